"""Runs pytest over one copy of the tree, in a process forked with torch loaded already."""

from __future__ import annotations

import os
import sys

import pytest

from tests.kvcache_core.mutations.catalogue import ROOT

OUTPUT = "output.txt"
"""What pytest printed, in the copy."""


def run_tests(copy: str, tests: list[str], report: str) -> None:
    """Run ``tests`` of the tree at ``copy``, write a junit report, end the process.

    Nothing of the original tree stays loaded: what this process imported to get here is forgotten,
    so that the copy's modules are imported anew.
    """
    packages = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            del sys.modules[name]
    sys.path[:] = [copy, *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
    os.chdir(copy)
    with open(OUTPUT, "w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    options = ["-q", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}"]
    sys.exit(pytest.main([*options, *tests]))
