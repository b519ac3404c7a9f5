PYTHON ?= .venv/bin/python

.PHONY: install serve test lint lock

install:
	python3 -m venv .venv
	.venv/bin/pip install -r requirements-dev.txt -e .

serve:
	.venv/bin/pageferry serve

test:
	.venv/bin/pytest

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/mypy

# Resolves both lock files anew in throw-away environments. torch is pinned first: an open range takes its newest CUDA build.
lock:
	rm -rf build/lock && python3 -m venv build/lock
	build/lock/bin/pip install torch==2.13.0
	build/lock/bin/pip install .
	( echo '# Lock of everything `pageferry serve` needs, as resolved by pip for Python 3.11 and newer (make lock).'; \
	  build/lock/bin/pip freeze --exclude pageferry | sed 's/+cpu$$//' ) > requirements.txt
	build/lock/bin/pip install '.[dev]'
	( echo '# Lock of everything the tests need (make lock).'; \
	  build/lock/bin/pip freeze --exclude pageferry | sed 's/+cpu$$//' ) > requirements-dev.txt
