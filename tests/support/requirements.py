"""What a test needs and the machine may lack: a skip, or a failure where the run insists on it."""

from __future__ import annotations

from typing import Final, NoReturn

import pytest

REQUIRE_GPU: Final = "--require-gpu"
REQUIRE_MODEL: Final = "--require-model"


def without_model(config: pytest.Config, reason: str) -> NoReturn:
    """End a test that cannot have the default model."""
    if config.getoption(REQUIRE_MODEL):
        pytest.fail(f"{REQUIRE_MODEL} was given: {reason}", pytrace=False)
    pytest.skip(reason)


def fail_if_skipped(report: pytest.TestReport) -> None:
    """Of a test that needs a GPU, where the run insists on one: a skip is a failure."""
    if not report.skipped or "wasxfail" in report.keywords:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{REQUIRE_GPU} was given: {reason}"
