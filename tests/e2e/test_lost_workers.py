"""Workers that are killed under many requests or before their pages have gone: answers whose first
token is out go on, the rest ends in time.

The back-off before a restart doubles while an instance keeps dying within a minute. So these kills
are in another module than those of ``test_dead_workers.py``, with long tests in between.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import Client, Streamed
from tests.e2e.conftest import Judge
from tests.e2e.killed import RESTART_S, assert_complete, request_of
from tests.support.launched_service import LaunchedService

pytestmark = [pytest.mark.ray, pytest.mark.ucx]

CHUNK_TOKENS = 512
KNOWN_S = 2.0
KILL_AFTER_S = 2.5
"""By then some of twenty requests decode, some are prefilled and some wait."""


@pytest.mark.timeout(300)
def test_a_lost_transfer_is_repaired_and_counted(
    service: LaunchedService, client: Client, smollm2_judge: Judge
) -> None:
    """The generation worker is paused, so that the pages cannot have arrived when token 1 is out
    and the context worker dies.
    """
    client.wait_ready(RESTART_S)
    client.wait_quiet()
    repairs = client.total("pageferry_repairs")
    computed = client.by_instance("pageferry_worker_prefill_tokens")["context-0"]
    context, generation = service.pid("context-0"), service.pid("generation-0")
    incarnation = client.incarnation("context-0")
    # One whole chunk and a short one: the pause falls between them, and is shorter than the
    # silence after which the workers give each other up.
    body = request_of(101, CHUNK_TOKENS + 100)
    paused = threading.Event()

    def pause() -> None:
        watcher = Client(client.url)
        while watcher.by_instance("pageferry_worker_prefill_tokens")["context-0"] == computed:
            time.sleep(0.02)
        os.kill(generation, signal.SIGSTOP)
        paused.set()

    def kill(choice: int, delta: int) -> None:
        if delta == 1:
            assert paused.is_set(), "token 1 came before the generation worker was paused"
            os.kill(context, signal.SIGKILL)
            # A generation worker that tells of the loss first has the request placed on the dead
            # worker once more, which is a second repair.
            Client(client.url).wait_gone("context-0", incarnation, KNOWN_S)
            os.kill(generation, signal.SIGCONT)

    threading.Thread(target=pause, daemon=True).start()
    try:
        got = client.stream("/v1/completions", on_delta=kill, **body)
    finally:
        os.kill(generation, signal.SIGCONT)
    assert_complete(smollm2_judge, 101, body, got)
    service.wait_restarted("context-0", context, RESTART_S)
    client.wait_back("context-0", incarnation, RESTART_S)
    assert client.total("pageferry_repairs") == repairs + 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("instance", ["context-0", "generation-0"])
def test_a_worker_dies_under_twenty_requests(
    service: LaunchedService, client: Client, smollm2_judge: Judge, instance: str
) -> None:
    """Every request ends before its deadline, whole or with an error; only the dead worker is
    restarted; the next twenty pass; every page is home on both sides.
    """
    client.wait_ready(RESTART_S)
    client.wait_quiet()
    free_before = client.free_blocks()
    others = {name: service.pid(name) for name in service.pids if name != instance}
    front_end = service.front_end().pid
    bodies = {number: request_of(number, 60) for number in range(200, 220)}
    victim, incarnation = service.pid(instance), client.incarnation(instance)

    def send(number: int) -> Streamed:
        return Client(client.url).stream("/v1/completions", **bodies[number])

    with ThreadPoolExecutor(len(bodies)) as pool:
        threading.Timer(KILL_AFTER_S, service.kill, [instance]).start()
        got_all = pool.map(lambda number: _timed(send, number), bodies)
        answers = dict(zip(bodies, got_all, strict=True))
    whole = {n: got for n, got in answers.items() if got.error is None}
    for number, got in whole.items():
        assert_complete(smollm2_judge, number, bodies[number], got)
    for got in answers.values():
        assert got.done != (got.error is not None)
    # Whatever had its first token, or could start anew elsewhere, was completed.
    assert len(whole) == len(bodies)
    service.wait_restarted(instance, victim, RESTART_S)
    client.wait_back(instance, incarnation, RESTART_S)
    assert {name: service.pid(name) for name in others} == others
    assert service.front_end().pid == front_end

    with ThreadPoolExecutor(len(bodies)) as pool:
        for got in pool.map(send, bodies):
            assert got.error is None, got.error
    client.wait_quiet()
    after = client.free_blocks()
    assert after == free_before


def _timed(send: Callable[[int], Streamed], number: int) -> Streamed:
    started = time.monotonic()
    got = send(number)
    assert time.monotonic() - started < 120
    return got
