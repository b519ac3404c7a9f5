"""Totals are monotone over incarnations, and two registries do not know each other."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.orchestration.api import WorkerPair, WorkerStatus
from services.orchestration.metrics import RequestMetrics, WorkerCollector
from tests.support.gauges import IDLE_GAUGES
from transfer.identity import Incarnation
from worker.interpreter import WAIT_BOUNDS_US, WAIT_CLASSES
from worker.messages import WorkerGauges


def make_gauges(total: int) -> WorkerGauges:
    return IDLE_GAUGES.model_copy(
        update={"transferred_bytes_total": total, "transfer_busy_ms_total": total}
    )


def test_totals_grow_over_a_restart() -> None:
    registry = CollectorRegistry()
    collector = WorkerCollector(tuple)
    registry.register(collector)
    name = "pageferry_transferred_bytes_total"

    def value() -> float | None:
        return registry.get_sample_value(name, {"instance": "generation-0"})

    first = Incarnation.mint("generation-0")
    collector.observe(first, make_gauges(100))
    collector.observe(first, make_gauges(150))
    assert value() == 150
    collector.fold(first)
    assert value() == 150
    collector.observe(Incarnation.mint("generation-0"), make_gauges(7))
    assert value() == 157
    seconds = registry.get_sample_value(
        "pageferry_transfer_busy_seconds_total", {"instance": "generation-0"}
    )
    assert seconds == pytest.approx(0.157)


def test_waits_for_the_interpreter_are_one_histogram_over_incarnations() -> None:
    registry = CollectorRegistry()
    collector = WorkerCollector(tuple)
    registry.register(collector)
    counts = [0] * WAIT_CLASSES
    counts[0], counts[-1] = 5, 1
    gauges = IDLE_GAUGES.model_copy(
        update={"interpreter_waits": tuple(counts), "interpreter_waited_us": 30_000}
    )
    first = Incarnation.mint("context-0")
    collector.observe(first, gauges)
    collector.fold(first)
    collector.observe(Incarnation.mint("context-0"), gauges)
    name = "pageferry_worker_interpreter_wait_seconds"

    def value(what: str, **labels: str) -> float | None:
        return registry.get_sample_value(name + what, {"instance": "context-0", **labels})

    last = WAIT_BOUNDS_US[-1] / 1e6
    assert value("_bucket", le=str(WAIT_BOUNDS_US[0] / 1e6)) == 10
    assert value("_bucket", le=str(last)) == 10
    assert value("_bucket", le="+Inf") == value("_count") == 12
    assert value("_sum") == pytest.approx(0.06)


def test_metrics_live_in_the_registry_that_is_passed_in() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    RequestMetrics(first).conflicts.inc()
    RequestMetrics(second)
    assert first.get_sample_value("pageferry_token_conflicts_total") == 1
    assert second.get_sample_value("pageferry_token_conflicts_total") == 0


def test_pairs_are_counted_by_the_transport_that_carries_pages() -> None:
    registry = CollectorRegistry()
    pairs = (
        WorkerPair("generation", "context-0@1/0", "shm", ""),
        WorkerPair("generation", "context-1@1/0", "shm", ""),
        WorkerPair("generation", "context-2@1/0", "", "being dialled"),
    )
    status = WorkerStatus(
        instance="generation-0",
        incarnation="generation-0@1",
        role="generation",
        state="live",
        ready=True,
        staging_bytes=5,
        kv_dtype="float8_e4m3",
        pairs=pairs,
    )
    registry.register(WorkerCollector(lambda: (status,)))
    labels = {"instance": "generation-0", "role": "generation"}

    def value(lane: str) -> float | None:
        found = {**labels, "side": "generation", "lane": lane}
        return registry.get_sample_value("pageferry_transfer_pairs", found)

    assert (value("shm"), value("none"), value("tcp")) == (2, 1, None)
    assert registry.get_sample_value("pageferry_worker_staging_bytes", labels) == 5
    in_fp8 = {**labels, "dtype": "float8_e4m3"}
    assert registry.get_sample_value("pageferry_worker_kv_cache", in_fp8) == 1
