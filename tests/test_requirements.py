"""A run that insists on the model or a GPU cannot be green without it."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.requirements import fail_if_skipped, without_model

Outcome = Literal["passed", "failed", "skipped"]


@pytest.mark.parametrize(
    ("required", "outcome"), [(True, pytest.fail.Exception), (False, pytest.skip.Exception)]
)
def test_a_missing_model_is_a_skip_or_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    outcome: type[Exception],
    *,
    required: bool,
) -> None:
    monkeypatch.setattr(pytestconfig.option, "require_model", required)
    with pytest.raises(outcome, match="no network"):
        without_model(pytestconfig, "no network")


@pytest.mark.parametrize(
    ("outcome", "end"), [("skipped", "failed"), ("passed", "passed"), ("failed", "failed")]
)
def test_b60_a_skip_for_want_of_a_gpu_fails_where_one_is_required(
    outcome: Outcome, end: Outcome
) -> None:
    where = ("tests/x.py", 3, "Skipped: no CUDA device")
    report = pytest.TestReport(
        "x", ("tests/x.py", 3, "x"), {}, outcome=outcome, longrepr=where, when="call"
    )
    fail_if_skipped(report)
    assert report.outcome == end
    if outcome == "skipped":
        assert report.longrepr == "--require-gpu was given: Skipped: no CUDA device"
