"""The default model: installed, cached, fetched; damaged, wrong and offline."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from services.default_model import DEFAULT_MODEL, ModelPackage, find, resolve
from services.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64
MODULE = "pageferry_model_for_tests"
FILE = "tiny.gguf"


def make_package(content: bytes = CONTENT) -> ModelPackage:
    return ModelPackage(
        name="Tiny",
        requirement=f"{MODULE.replace('_', '-')}==1.0",
        module=MODULE,
        member=f"{MODULE}/{FILE}",
        sha256=hashlib.sha256(content).hexdigest(),
        wheel_bytes=len(content),
    )


def make_wheel(folder: Path, content: bytes) -> None:
    """The smallest wheel that pip accepts, with a need that exists nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{MODULE}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{MODULE}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{MODULE}/__init__.py", "raise ImportError('must not be imported')\n")
        wheel.writestr(f"{MODULE}/{FILE}", content)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n"
            "Requires-Dist: nothing-of-this-name-exists\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Points pip at a folder and nowhere else; the function puts a wheel with some content
    there."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return lambda content: make_wheel(folder, content)


def test_the_pinned_file_is_the_one_named_in_the_documentation() -> None:
    assert DEFAULT_MODEL.sha256.startswith("b179c9523d0e6a0f")
    assert len(DEFAULT_MODEL.sha256) == 64


def test_an_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / MODULE).mkdir(parents=True)
    (site / MODULE / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (site / MODULE / FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(site))
    assert (
        resolve(package=make_package(), cache_directory=tmp_path / "cache") == site / MODULE / FILE
    )
    assert MODULE not in sys.modules
    assert not (tmp_path / "cache").exists()


def test_a_damaged_installed_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[bytes], None]
) -> None:
    site = tmp_path / "site"
    (site / MODULE).mkdir(parents=True)
    (site / MODULE / "__init__.py").touch()
    (site / MODULE / FILE).write_bytes(b"damaged")
    monkeypatch.syspath_prepend(str(site))
    index(CONTENT)
    lines: list[str] = []
    found = resolve(
        package=make_package(), cache_directory=tmp_path / "cache", progress=lines.append
    )
    assert found.read_bytes() == CONTENT
    assert "ignoring it" in lines[0]


def test_fetched_once_without_its_needs_then_cached(
    tmp_path: Path, index: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    index(CONTENT)
    lines: list[str] = []
    cache = tmp_path / "cache"
    found = resolve(package=make_package(), cache_directory=cache, progress=lines.append)
    assert found == cache / "models" / FILE
    assert found.read_bytes() == CONTENT
    assert any(line.startswith("fetching Tiny") for line in lines)
    # Nothing but the file stays behind.
    assert [path.name for path in (cache / "models").iterdir()] == [FILE]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    lines.clear()
    assert resolve(package=make_package(), cache_directory=cache, progress=lines.append) == found
    assert lines == []


def test_a_damaged_cached_file_is_fetched_again(
    tmp_path: Path, index: Callable[[bytes], None]
) -> None:
    index(CONTENT)
    cached = tmp_path / "models" / FILE
    cached.parent.mkdir()
    cached.write_bytes(CONTENT[:-1])
    assert find(package=make_package(), cache_directory=tmp_path) is None
    assert resolve(package=make_package(), cache_directory=tmp_path).read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_not_kept(
    tmp_path: Path, index: Callable[[bytes], None]
) -> None:
    index(b"something else")
    with pytest.raises(ModelError, match=r"expected sha256 .* got .* nothing was kept"):
        resolve(package=make_package(), cache_directory=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_offline_is_a_clear_error_that_says_what_to_do(
    tmp_path: Path, index: Callable[[bytes], None]
) -> None:
    with pytest.raises(ModelError, match=r"cannot be fetched; check the network .*serve PATH"):
        resolve(package=make_package(), cache_directory=tmp_path)


def test_a_cache_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, index: Callable[[bytes], None]
) -> None:
    index(CONTENT)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        resolve(package=make_package(), cache_directory=tmp_path / "cache")
