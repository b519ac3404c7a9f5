"""The mutations: one changed line each, and the tests that must notice.

A ``*.toml`` file of this folder holds ``[[mutation]]`` tables with ``row`` (the requirement),
``file`` (below the root), ``old`` (a piece of one line that occurs exactly once in the file),
``new`` (what replaces it) and ``tests`` (pytest ids, without parameters).
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent.parent
FIELDS = {"row", "file", "old", "new", "tests"}


@dataclass(frozen=True)
class Mutation:
    """One changed line; ``source`` is the file that lists it, ``number`` its place there."""

    source: str
    number: int
    row: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the reports call it."""
        return f"{self.source}#{self.number} {self.row}"

    def faults(self, root: Path) -> list[str]:
        """Why it cannot be applied to the tree at ``root``; empty when it can."""
        path = root / self.file
        if not path.is_file():
            return [f"{self.name}: no file {self.file}"]
        count = path.read_text().count(self.old)
        faults = []
        if count != 1:
            faults.append(f"{self.name}: {self.old!r} occurs {count} times in {self.file}")
        elif self.file.endswith(".py") and not _parses(self.applied(path.read_text())):
            faults.append(f"{self.name}: {self.file} is no Python after the change")
        if "\n" in self.old.strip("\n") or self.old == self.new:
            faults.append(f"{self.name}: it must change one line")
        faults += [f"{self.name}: no test {test}" for test in self.tests if not _exists(root, test)]
        if not self.tests:
            faults.append(f"{self.name}: it names no test")
        return faults

    def applied(self, text: str) -> str:
        """The file's text with the change."""
        return text.replace(self.old, self.new)


def load(folder: Path = FOLDER) -> list[Mutation]:
    """Every mutation of the folder. Raises ValueError for a table with other fields."""
    mutations = []
    for path in sorted(folder.glob("*.toml")):
        tables = tomllib.loads(path.read_text()).get("mutation", [])
        for number, table in enumerate(tables, start=1):
            if set(table) != FIELDS:
                raise ValueError(
                    f"{path.name} mutation {number}: expected the fields {sorted(FIELDS)}, "
                    f"got {sorted(table)}"
                )
            mutations.append(
                Mutation(
                    source=path.stem,
                    number=number,
                    row=table["row"],
                    file=table["file"],
                    old=table["old"],
                    new=table["new"],
                    tests=tuple(table["tests"]),
                )
            )
    return mutations


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _exists(root: Path, test: str) -> bool:
    """Whether a pytest id, without parameters, names a function of a file."""
    file, *names = test.split("::")
    path = root / file
    if not names or not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
        if not found:
            return _is_assigned(body, name)
        body = found[0].body
    return True


def _is_assigned(body: list[ast.stmt], name: str) -> bool:
    """Hypothesis' state machines become tests by an assignment: ``TestX = Machine.TestCase``."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        for node in body
    )
