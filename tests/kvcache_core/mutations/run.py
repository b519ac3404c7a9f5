"""Break every row once: ``python -m tests.kvcache_core.mutations.run [--only ROW]``.

The tree is copied to a temporary directory. Unchanged, all tests named by the mutations must pass
there; then each mutation is applied alone and each test that it names must fail. Prints a table
and, as the last line, one JSON object; exits with 1 when a mutation survives or cannot be applied.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.kvcache_core.mutations.catalogue import ROOT, Mutation, load
from tests.kvcache_core.mutations.child import OUTPUT, run_tests

COPIED = ("kvcache_core", "transfer", "worker", "router", "services", "benchmarks", "tests")
FILES = ("pyproject.toml",)
PROCESSES = multiprocessing.get_context("forkserver")
TEST_LIMIT_S = 300
"""A mutated test that does not end by then has noticed the mutation."""


class Verdict(Enum):
    """What became of a mutation."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Result:
    """The verdict on one mutation; ``detail`` names the tests that passed, or the fault."""

    mutation: Mutation
    verdict: Verdict
    detail: str
    seconds: float


class WorkCopies:
    """Copies of the tree, each used by one thread at a time."""

    def __init__(self, count: int, folder: Path) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self.paths = [folder / f"copy-{number}" for number in range(count)]
        for path in self.paths:
            copy_tree(ROOT, path)
            self._free.put(path)

    @contextmanager
    def borrow(self) -> Iterator[Path]:
        """One copy, unchanged; changes to it must be undone."""
        path = self._free.get()
        try:
            yield path
        finally:
            self._free.put(path)


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need, without caches: a stale byte-code file could hide a change."""
    ignored = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(source / name, target / name)


def outcomes(copy: Path, tests: Sequence[str]) -> dict[str, bool] | None:
    """Whether each test passed (in all its parameters); None when the run did not end in time.

    A test that could not be collected or was skipped has not passed.
    """
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    process = PROCESSES.Process(target=run_tests, args=(str(copy), list(tests), str(report)))
    process.start()
    process.join(TEST_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else iter(())
    passed: dict[str, bool] = {}
    for case in cases:
        if case.find("skipped") is not None:
            continue
        name = f"{case.get('classname')}.{case.get('name', '').split('[')[0]}"
        failed = case.find("failure") is not None or case.find("error") is not None
        passed[name] = passed.get(name, True) and not failed
    return {test: passed.get(_junit_name(test), False) for test in tests}


def _junit_name(test: str) -> str:
    """``a/b.py::C::d`` as pytest's report names it: ``a.b.C.d``."""
    file, *names = test.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *names])


def judge(mutation: Mutation, copies: WorkCopies) -> Result:
    """Apply one mutation to a copy, run its tests, undo it."""
    start = time.monotonic()
    faults = mutation.faults(ROOT)
    if faults:
        return Result(mutation, Verdict.INVALID, "; ".join(faults), 0.0)
    with copies.borrow() as copy:
        path = copy / mutation.file
        text = path.read_text()
        path.write_text(mutation.applied(text))
        try:
            passed = outcomes(copy, mutation.tests)
        finally:
            path.write_text(text)
    alive = [] if passed is None else [test for test, is_passed in passed.items() if is_passed]
    verdict = Verdict.SURVIVED if alive else Verdict.KILLED
    detail = "no end" if passed is None else ", ".join(alive)
    return Result(mutation, verdict, detail, time.monotonic() - start)


def check_unmutated(mutations: Sequence[Mutation], copies: WorkCopies) -> list[str]:
    """Named tests that fail in the unchanged tree."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with copies.borrow() as copy:
        passed = outcomes(copy, tests)
        failing = tests if passed is None else [test for test in tests if not passed[test]]
        if failing:
            print((copy / OUTPUT).read_text()[-4000:])
    return failing


def main() -> None:
    parser = argparse.ArgumentParser(description="Break every row once; its tests must notice.")
    parser.add_argument("--only", metavar="ROW", help="mutations of one row, or of one file's stem")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    mutations = [
        mutation for mutation in load() if arguments.only in (None, mutation.row, mutation.source)
    ]
    if not mutations:
        parser.error(f"no mutation of {arguments.only}")
    PROCESSES.set_forkserver_preload(["numpy", "torch"])
    start = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        copies = WorkCopies(arguments.processes, Path(folder))
        applicable = [mutation for mutation in mutations if not mutation.faults(ROOT)]
        broken = check_unmutated(applicable, copies) if applicable else []
        for test in broken:
            print(f"fails without any mutation: {test}", flush=True)
        with ThreadPoolExecutor(arguments.processes) as threads:
            running = [threads.submit(judge, mutation, copies) for mutation in mutations]
            for future in as_completed(running):
                result = future.result()
                results.append(result)
                print(
                    f"{result.mutation.name:<24} {result.verdict.value:<9} {result.seconds:6.1f} s "
                    f"{result.mutation.file}: {result.mutation.new.strip()}  {result.detail}",
                    flush=True,
                )
    counts = {
        verdict.name.lower(): sorted(r.mutation.name for r in results if r.verdict is verdict)
        for verdict in (Verdict.SURVIVED, Verdict.INVALID)
    }
    rows = sorted({mutation.row for mutation in mutations})
    killed = sum(result.verdict is Verdict.KILLED for result in results)
    print(
        json.dumps(
            {
                "mutations": len(results),
                "killed": killed,
                **counts,
                "fail_unmutated": broken,
                "rows": rows,
                "seconds": round(time.monotonic() - start, 1),
            }
        ),
        flush=True,
    )
    sys.exit(0 if killed == len(results) and not broken else 1)


if __name__ == "__main__":
    main()
