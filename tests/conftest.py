"""Options of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer

from tests.support.requirements import REQUIRE_GPU, REQUIRE_MODEL, fail_if_skipped
from tests.support.suite_groups import GroupScheduling, turn

SOAK_S = "--soak-s"
GPU_MARKERS = ("gpu", "multi_gpu")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by torch when it is imported. Threads that wait for each other in every operation are
    # slower than one where another process of the suite has the second core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not Path("/dev/nvidiactl").exists():
    # Read when triton is imported, which torch may do: the CPU runs kernels, a program at a time.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An example that is slow because another process has the core is not wrong.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        REQUIRE_GPU,
        action="store_true",
        help="a test marked gpu or multi_gpu that is skipped fails instead",
    )
    parser.addoption(
        REQUIRE_MODEL,
        action="store_true",
        help="a test that needs the default model fails where it neither is nor can be fetched",
    )
    parser.addoption(
        SOAK_S, type=float, default=1_800, help="seconds that the soak of a whole service takes"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs_gpu = any(item.get_closest_marker(marker) for marker in GPU_MARKERS)
    if needs_gpu and item.config.getoption(REQUIRE_GPU):
        fail_if_skipped(report)
    return report
