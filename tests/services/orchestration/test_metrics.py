"""Totals are monotone over incarnations, and two registries do not know each other."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.orchestration.metrics import RequestMetrics, WorkerCollector
from transfer.identity import Incarnation
from worker.messages import WorkerGauges


def make_gauges(total: int) -> WorkerGauges:
    return WorkerGauges(
        ready=True,
        total_blocks=10,
        free_blocks=10,
        cached_blocks=0,
        running=0,
        waiting=0,
        suspended=0,
        transfers_in_flight=0,
        quarantined_blocks=0,
        prefill_tokens_total=total,
        decode_tokens_total=total,
        cached_tokens_total=total,
        transferred_bytes_total=total,
        transferred_blocks_total=total,
        preemptions_total=0,
        steps_total=total,
        host_cached_tokens_total=0,
        evicted_pages_total=0,
        demoted_pages_total=0,
        onboarded_pages_total=0,
        pulls_succeeded_total=0,
        pulls_declined_total=0,
        pulls_failed_total=0,
        pulls_served_total=0,
        pulled_tokens_total=0,
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


def test_metrics_live_in_the_registry_that_is_passed_in() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    RequestMetrics(first).conflicts.inc()
    RequestMetrics(second)
    assert first.get_sample_value("pageferry_token_conflicts_total") == 1
    assert second.get_sample_value("pageferry_token_conflicts_total") == 0
