"""Metrics of the front end, in a registry that is passed in.

Every counter is monotone over restarts of workers: a worker's totals restart with its incarnation,
so those of past incarnations are kept and added. A request counts once, here, however many legs it
had.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from services.orchestration.api import WorkerStatus
from transfer.identity import Incarnation
from worker.interpreter import WAIT_BOUNDS_US, WAIT_CLASSES
from worker.messages import WorkerGauges

TTFT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
DURATION_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

WORKER_TOTALS: Final[dict[str, tuple[str, Callable[[WorkerGauges], float]]]] = {
    "pageferry_worker_prefill_tokens": (
        "Prompt tokens that workers computed",
        lambda gauges: gauges.prefill_tokens_total,
    ),
    "pageferry_worker_decode_tokens": (
        "Output tokens that workers computed",
        lambda gauges: gauges.decode_tokens_total,
    ),
    "pageferry_worker_cached_tokens": (
        "Prompt tokens that workers found in their prefix caches",
        lambda gauges: gauges.cached_tokens_total,
    ),
    "pageferry_transferred_bytes": (
        "Bytes of KV pages that workers sent (context) or received (generation)",
        lambda gauges: gauges.transferred_bytes_total,
    ),
    "pageferry_transferred_blocks": (
        "Blocks of KV pages that workers sent (context) or received (generation)",
        lambda gauges: gauges.transferred_blocks_total,
    ),
    "pageferry_worker_preemptions": (
        "Sequences suspended for lack of pages",
        lambda gauges: gauges.preemptions_total,
    ),
    "pageferry_worker_steps": ("Engine steps", lambda gauges: gauges.steps_total),
    "pageferry_worker_host_cached_tokens": (
        "Cached prompt tokens of blocks of which a page lay in host memory",
        lambda gauges: gauges.host_cached_tokens_total,
    ),
    "pageferry_worker_evicted_pages": (
        "Pages lost from the prefix cache for room",
        lambda gauges: gauges.evicted_pages_total,
    ),
    "pageferry_worker_demoted_pages": (
        "Pages moved to host memory for room",
        lambda gauges: gauges.demoted_pages_total,
    ),
    "pageferry_worker_onboarded_pages": (
        "Pages brought back from host memory",
        lambda gauges: gauges.onboarded_pages_total,
    ),
    "pageferry_prefix_pulls_succeeded": (
        "Prefixes that context workers fetched from other instances",
        lambda gauges: gauges.pulls_succeeded_total,
    ),
    "pageferry_prefix_pulls_declined": (
        "Prefixes that the asked instance did not have, or did not serve",
        lambda gauges: gauges.pulls_declined_total,
    ),
    "pageferry_prefix_pulls_failed": (
        "Prefixes that were computed because fetching them failed",
        lambda gauges: gauges.pulls_failed_total,
    ),
    "pageferry_prefix_pulls_served": (
        "Prefixes that other instances fetched from this one",
        lambda gauges: gauges.pulls_served_total,
    ),
    "pageferry_pulled_tokens": (
        "Prompt tokens whose KV was fetched from another instance",
        lambda gauges: gauges.pulled_tokens_total,
    ),
    "pageferry_transfer_late_dials": (
        "Requests whose context worker was dialled only when they came",
        lambda gauges: gauges.late_dials_total,
    ),
    "pageferry_transfer_busy_seconds": (
        "Time in which pages moved, over all pairs",
        lambda gauges: gauges.transfer_busy_ms_total / 1000,
    ),
    "pageferry_transfer_busy_bytes": (
        "Bytes of pages moved in pageferry_transfer_busy_seconds",
        lambda gauges: gauges.transfer_busy_bytes_total,
    ),
    "pageferry_staged_bytes": (
        "Bytes of pages that a gather or a scatter copied",
        lambda gauges: gauges.staged_bytes_total,
    ),
}

WORKER_GAUGES: Final[dict[str, tuple[str, Callable[[WorkerStatus], int]]]] = {
    "pageferry_worker_up": (
        "Whether the worker is connected and answers",
        lambda status: int(status.state == "live"),
    ),
    "pageferry_worker_ready": (
        "Whether the worker accepts requests",
        lambda status: int(status.ready),
    ),
    "pageferry_worker_running": ("Sequences in the batch", lambda status: status.running),
    "pageferry_worker_waiting": ("Legs that wait on the worker", lambda status: status.waiting),
    "pageferry_worker_total_blocks": ("Blocks of the pools", lambda status: status.total_blocks),
    "pageferry_worker_free_blocks": (
        "Blocks that no sequence and no lease holds",
        lambda status: status.free_blocks,
    ),
    "pageferry_worker_cached_blocks": (
        "Blocks in the prefix cache",
        lambda status: status.cached_blocks,
    ),
    "pageferry_worker_quarantined_blocks": (
        "Blocks that a broken transfer may still write",
        lambda status: status.quarantined_blocks,
    ),
    "pageferry_worker_transfers_in_flight": (
        "Transfers in flight",
        lambda status: status.transfers_in_flight,
    ),
    "pageferry_worker_staging_bytes": (
        "Memory of staging buffers, beside every quota",
        lambda status: status.staging_bytes,
    ),
}


class RequestMetrics:
    """What happened to requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pageferry_requests",
            "Requests by endpoint and outcome",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.refused = Counter(
            "pageferry_requests_refused",
            "Requests that were not accepted, by reason",
            ("endpoint", "reason"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "pageferry_requests_in_flight", "Accepted requests without an end", registry=registry
        )
        self.first_token = Histogram(
            "pageferry_time_to_first_token_seconds",
            "From submission to the first token",
            ("endpoint",),
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "pageferry_inter_token_latency_seconds",
            "Between the token messages of a choice, for each token",
            ("endpoint",),
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "pageferry_request_duration_seconds",
            "From submission to the terminal event",
            ("endpoint",),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.placements = Counter(
            "pageferry_placements",
            "Placements by the term that decided",
            ("reason",),
            registry=registry,
        )
        self.repairs = Counter(
            "pageferry_repairs", "Legs replaced after a failure", ("cause",), registry=registry
        )
        self.conflicts = Counter(
            "pageferry_token_conflicts",
            "Tokens about which two workers disagreed; anything but 0 is a bug",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pageferry_prompt_tokens", "Prompt tokens of completed requests", registry=registry
        )
        self.cached_tokens = Counter(
            "pageferry_cached_tokens",
            "Prompt tokens of completed requests that came from a prefix cache",
            registry=registry,
        )
        self.completion_tokens = Counter(
            "pageferry_completion_tokens", "Output tokens of completed requests", registry=registry
        )
        self.generation_prefill_tokens = Counter(
            "pageferry_generation_prefill_tokens",
            "Prompt tokens that generation legs computed although their pages came by transfer",
            registry=registry,
        )
        self.local_prefill_tokens = Counter(
            "pageferry_local_prefill_tokens",
            "Prompt tokens computed by legs without a context worker",
            registry=registry,
        )


class WorkerCollector(Collector):
    """Figures of workers, read when they are scraped."""

    def __init__(self, statuses: Callable[[], Iterable[WorkerStatus]]) -> None:
        self._statuses = statuses
        self._latest: dict[Incarnation, WorkerGauges] = {}
        self._past: dict[str, dict[str, float]] = {}
        self._past_waits: dict[str, Waits] = {}

    def observe(self, worker: Incarnation, gauges: WorkerGauges) -> None:
        """The latest figures of an incarnation."""
        self._latest[worker] = gauges

    def fold(self, worker: Incarnation) -> None:
        """An incarnation is gone: its totals become those of its instance's past."""
        gauges = self._latest.pop(worker, None)
        if gauges is None:
            return
        past = self._past.setdefault(worker.instance, dict.fromkeys(WORKER_TOTALS, 0.0))
        for name, (_, read) in WORKER_TOTALS.items():
            past[name] += read(gauges)
        waits = self._past_waits.get(worker.instance, Waits())
        self._past_waits[worker.instance] = waits.with_more(gauges)

    @override
    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in WORKER_TOTALS.items():
            totals = {instance: past[name] for instance, past in self._past.items()}
            for worker, gauges in self._latest.items():
                totals[worker.instance] = totals.get(worker.instance, 0) + read(gauges)
            counter = CounterMetricFamily(name, text, labels=("instance",))
            for instance, total in sorted(totals.items()):
                counter.add_metric((instance,), total)
            yield counter
        yield self._waits()
        statuses = {(status.instance, status.role): status for status in self._statuses()}
        for name, (text, read_status) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=("instance", "role"))
            for labels, status in statuses.items():
                gauge.add_metric(labels, read_status(status))
            yield gauge
        yield _caches(statuses.values())
        yield _pairs(statuses.values())

    def _waits(self) -> Metric:
        found = dict(self._past_waits)
        for worker, gauges in self._latest.items():
            found[worker.instance] = found.get(worker.instance, Waits()).with_more(gauges)
        histogram = HistogramMetricFamily(
            "pageferry_worker_interpreter_wait_seconds",
            "Waits of the engine thread for Python's interpreter, one a step",
            labels=("instance",),
        )
        for instance, waits in sorted(found.items()):
            histogram.add_metric((instance,), waits.buckets(), waits.waited_us / 1e6)
        return histogram


@dataclass(frozen=True)
class Waits:
    """Of one instance's engine threads, by the classes of ``WAIT_BOUNDS_US`` and one above all."""

    counts: tuple[int, ...] = (0,) * WAIT_CLASSES
    waited_us: int = 0

    def with_more(self, gauges: WorkerGauges) -> Waits:
        """These and an incarnation's."""
        counts = zip(self.counts, gauges.interpreter_waits, strict=True)
        return Waits(
            tuple(mine + more for mine, more in counts),
            self.waited_us + gauges.interpreter_waited_us,
        )

    def buckets(self) -> list[tuple[str, float]]:
        """Upper ends in seconds, and how many were no longer: what Prometheus shows."""
        ends = [*(str(bound / 1e6) for bound in WAIT_BOUNDS_US), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True))


def _caches(statuses: Iterable[WorkerStatus]) -> Metric:
    gauge = GaugeMetricFamily(
        "pageferry_worker_kv_cache",
        "1 for each worker that was seen, with the element type of its keys and values",
        labels=("instance", "role", "dtype"),
    )
    for status in statuses:
        if status.kv_dtype:
            gauge.add_metric((status.instance, status.role, status.kv_dtype), 1)
    return gauge


def _pairs(statuses: Iterable[WorkerStatus]) -> Metric:
    gauge = GaugeMetricFamily(
        "pageferry_transfer_pairs",
        "Peer ranks by the transport that carries pages; none is one that is not connected",
        labels=("instance", "role", "side", "lane"),
    )
    counts = Counts(
        (status.instance, status.role, pair.side, pair.lane or "none")
        for status in statuses
        for pair in status.pairs
    )
    for labels, count in sorted(counts.items()):
        gauge.add_metric(labels, count)
    return gauge
