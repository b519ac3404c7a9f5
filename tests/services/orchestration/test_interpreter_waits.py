"""The benchmark's reading of the waits for the interpreter."""

from __future__ import annotations

import pytest

from benchmarks.interpreter_waits import quantile

BUCKETS = [(0.0001, 90.0), (0.0005, 99.0), (float("inf"), 100.0), (0.001, 99.0)]


@pytest.mark.parametrize(
    ("share", "end_ms"), [(0.5, 0.1), (0.9, 0.1), (0.91, 0.5), (0.99, 0.5), (1, float("inf"))]
)
def test_the_class_that_reaches_a_share(share: float, end_ms: float) -> None:
    assert quantile(BUCKETS, share) == pytest.approx(end_ms)
