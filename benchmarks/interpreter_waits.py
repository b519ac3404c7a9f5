"""What workers of a running service say of the engine thread's waits for the interpreter."""

from __future__ import annotations

from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

METRIC: Final = "pageferry_worker_interpreter_wait_seconds"


def read(url: str) -> dict[str, dict[str, float]]:
    """By instance: waits so far, and the upper ends in ms of the classes that hold the median and
    the 99th percentile.
    """
    text = httpx.get(url + "/metrics", timeout=10).raise_for_status().text
    counts: dict[str, list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{METRIC}_bucket":
                bucket = (float(sample.labels["le"]), sample.value)
                counts.setdefault(sample.labels["instance"], []).append(bucket)
    if not counts:
        raise RuntimeError(f"expected {METRIC} of a worker in {url}/metrics, found none")
    return {
        instance: {
            "waits": max(count for _, count in buckets),
            "p50_ms": quantile(buckets, 0.5),
            "p99_ms": quantile(buckets, 0.99),
        }
        for instance, buckets in counts.items()
    }


def quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Upper end in ms of the first class by which ``share`` of all waits is reached, from pairs of
    upper end in seconds and number of waits no longer.
    """
    ordered = sorted(buckets)
    wanted = share * ordered[-1][1]
    return next(end for end, count in ordered if count >= wanted) * 1e3
