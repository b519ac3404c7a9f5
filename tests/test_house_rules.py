"""Rules that no linter checks: file size, fixed top level, no defaulted getattr, no unfinished
marks, no pickle.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvcache_core", "transfer", "worker", "router", "services")
MAX_LINES = 500
TOP_LEVEL = {
    *PACKAGES,
    "deploy",
    "tests",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "requirements.txt",
    "requirements-dev.txt",
}


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout: the tracked files can't be listed")
    return [ROOT / name for name in listing.stdout.split("\n") if name and (ROOT / name).exists()]


def product_calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in tracked("*.py"):
        if path.relative_to(ROOT).parts[0] not in PACKAGES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path, node


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert lengths, "no Python file found"
    assert {str(p): n for p, n in lengths.items() if n > MAX_LINES} == {}


def test_top_level_holds_only_what_is_agreed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_nothing_probes_attributes_by_name() -> None:
    """A defaulted getattr or hasattr turns a rename into silence."""
    found = [
        f"{path.name}:{call.lineno}"
        for path, call in product_calls()
        if isinstance(call.func, ast.Name)
        and (call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3))
    ]
    assert found == []


def test_nothing_unfinished_and_no_pickle() -> None:
    marks = (
        "TO" + "DO",
        "FIX" + "ME",
        "XX" + "X",
        "NotImplemented" + "Error",
        "import pick" + "le",
    )
    found = [
        f"{path.name}: {mark}"
        for path in tracked("*.py")
        if path.relative_to(ROOT).parts[0] in PACKAGES
        for mark in marks
        if mark in path.read_text()
    ]
    assert found == []


def test_environment_is_read_in_few_places() -> None:
    """Configuration comes in by arguments; the environment is read where it is parsed, or set
    before a library loads.
    """
    allowed = {"environment.py", "settings.py"}
    found = [
        str(path.relative_to(ROOT))
        for path in tracked("*.py")
        if path.relative_to(ROOT).parts[0] in PACKAGES
        and path.name not in allowed
        and "os.environ[" in path.read_text()
    ]
    assert found == []
