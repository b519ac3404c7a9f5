"""A whole service for half an hour, of whose clients a third leave: nothing grows, nothing is lost.

Left out by default; ``--soak-s`` sets another length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median, quantiles

import pytest

from tests.conftest import SOAK_S
from tests.e2e.bursts import Burst
from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.e2e.health_watch import health_watch
from tests.support.launched_service import LaunchedService
from tests.support.oracle import ReferenceModel
from tests.support.process_facts import ProcessFacts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(3600)]

OPTIONS = (
    *("--tokens-per-block", "16", "--max-batch-tokens", "64", "--device", "cpu"),
    *("--kv-cache-bytes", "8MiB", "--host-cache-bytes", "16MiB"),
)
REQUESTS, LEAVING = 64, 20
MIB = 1 << 20
GROWTH_BYTES = 8 * MIB
"""Allowed of a process in the second half. oneDNN compiles a kernel of a MiB for each product and
number of rows that a step of the context worker has for the first time, some two hundred in all:
what counts is the median batch, times the batches.
"""
SETTLE_S = 10.0


def facts_of(
    pids: Mapping[str, int], before: Mapping[str, ProcessFacts]
) -> dict[str, ProcessFacts]:
    """Of every process, once none has more descriptors than before, or after a while."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        facts = {name: ProcessFacts.of(pid) for name, pid in pids.items()}
        more = [name for name in before if facts[name].descriptors > before[name].descriptors]
        if not more or time.monotonic() > deadline:
            return facts
        time.sleep(0.2)


def told(facts: Mapping[str, ProcessFacts]) -> str:
    return "; ".join(
        f"{name} {one.rss_bytes / MIB:.1f} MiB, {one.descriptors} fd, {one.threads} threads"
        for name, one in facts.items()
    )


def batch(url: str, number: int, reference: ReferenceModel) -> tuple[int, int]:
    """One burst, every answer judged, every page home; who left, before token 1 and after."""
    client = Client(url)
    with contextlib.closing(client.http):
        free_before = client.free_blocks()
        served = Burst(number, REQUESTS, LEAVING, patience_s=4.0).run(client)
        client.wait_quiet()
        assert client.free_blocks() == free_before
        assert not any(client.by_instance("pageferry_worker_quarantined_blocks").values())
        assert client.total("pageferry_requests_in_flight") == 0
        assert client.total("pageferry_repairs") == 0
    served.judge(reference)
    assert len(served.answers) == REQUESTS - LEAVING
    return served.left_waiting, served.left_decoding


def test_a_service_whose_clients_leave_keeps_nothing(
    tiny_models: TinyModels, pytestconfig: pytest.Config
) -> None:
    model, _ = tiny_models("llama")
    reference = ReferenceModel(model)
    with LaunchedService(model, *OPTIONS) as service, health_watch(service.url) as seen:
        pids = {
            "launcher": service.process.pid,
            "front end": service.front_end().pid,
            **{instance: service.pid(instance) for instance in service.pids},
        }
        history: list[dict[str, ProcessFacts]] = []
        left = [0, 0]
        end = time.monotonic() + pytestconfig.getoption(SOAK_S)
        while time.monotonic() < end or len(history) < 4:
            waiting, decoding = batch(service.url, len(history), reference)
            left[0] += waiting
            left[1] += decoding
            history.append(facts_of(pids, history[-1] if history else {}))
            print(f"batch {len(history)}: {told(history[-1])}", flush=True)
        assert {name: service.pid(name) for name in service.pids}.items() <= pids.items()
    quick = quantiles(seen.health_s, n=100)[-1]
    print(
        f"{len(history) * REQUESTS} requests, {left[0]} left before token 1, {left[1]} after; "
        f"/health {quick:.3f} s (p99) and {max(seen.health_s):.3f} s (slowest)"
    )
    assert seen.complaints == []
    assert quick < 1.0
    assert min(left) > 0
    warm = history[len(history) // 2 :]
    for name in pids:
        grown = median(new[name].rss_bytes - old[name].rss_bytes for old, new in pairwise(warm))
        old, new = warm[0][name], warm[-1][name]
        print(f"{name}: {grown / REQUESTS:.0f} bytes a request")
        assert grown * len(warm) < GROWTH_BYTES, name
        assert (new.descriptors, new.threads) == (old.descriptors, old.threads), name
        assert new.shared_segments == old.shared_segments, name
