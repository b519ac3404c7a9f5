"""The list of mutations fits the source: mutations/run.py itself takes minutes and runs by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvcache_core.mutations.catalogue import ROOT, Mutation, load

MUTATIONS = load()


def test_there_are_mutations() -> None:
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_line_and_names_tests_that_exist(mutation: Mutation) -> None:
    assert mutation.faults(ROOT) == []


def test_faults_are_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").write_text("class TestA:\n    def test_b(self): ...\n")

    def faults(**changes: object) -> str:
        fields: dict[str, object] = {
            "source": "part",
            "number": 1,
            "row": "K1",
            "file": "code.py",
            "old": "a = 1",
            "new": "a = 2",
            "tests": ("test_code.py::TestA::test_b",),
        }
        return "; ".join(Mutation(**{**fields, **changes}).faults(tmp_path))  # type: ignore[arg-type]

    assert faults() == ""
    assert "occurs 2 times" in faults(old=" = 1")
    assert "occurs 0 times" in faults(old="c = 1")
    assert "no Python after" in faults(new="a = = 2")
    assert "one line" in faults(new="a = 1")
    assert "one line" in faults(old="a = 1\nb")
    assert "no file other.py" in faults(file="other.py")
    assert "no test test_code.py::test_c" in faults(tests=("test_code.py::test_c",))
    assert "names no test" in faults(tests=())
