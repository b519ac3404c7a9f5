"""Context workers whose ranks have prompts of their own: a generation leg waits until its source is
known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.services.orchestration.rig import Collected, Rig, make_request, oracle, pair, rig, until
from worker.messages import Cancel, Generate, Prefill


@asynccontextmanager
async def dp_pair() -> AsyncIterator[tuple[Rig, asyncio.Event]]:
    """A service whose context worker has three ranks. Once ready it places nothing before the gate
    is open.
    """
    workers = pair()
    workers[0].script.ranks.size = 3
    async with rig(workers) as cluster:
        gate = workers[0].script.ranks.gate = asyncio.Event()
        yield cluster, gate


async def test_the_source_is_the_rank_that_has_the_prompt() -> None:
    async with dp_pair() as (cluster, gate):
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        await until(lambda: bool(cluster.received(Prefill)))
        assert not cluster.received(Generate)
        gate.set()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert not result.completed().repaired
        (message,) = cluster.received(Generate)
        assert message.source is not None
        assert message.source.incarnation == cluster.workers[0].incarnation
        assert (message.source.rank, message.source.control_port) == (2, 3)
        assert message.source.ranks == (message.source,)


async def test_a_context_worker_that_dies_before_it_has_placed() -> None:
    async with dp_pair() as (cluster, _):
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        await until(lambda: bool(cluster.received(Prefill)))
        await cluster.workers[0].kill()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired
        (repair,) = cluster.received(Generate)
        assert repair.source is None
        await until(lambda: cluster.service.in_flight == 0)


async def test_a_generation_worker_that_dies_before_it_was_asked() -> None:
    async with dp_pair() as (cluster, gate):
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        await until(lambda: bool(cluster.received(Prefill)))
        await cluster.workers[1].kill()
        gate.set()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired


async def test_a_request_that_is_cancelled_before_it_was_placed() -> None:
    async with dp_pair() as (cluster, gate):
        stream = await cluster.service.submit(make_request(max_tokens=4))
        await until(lambda: bool(cluster.received(Prefill)))
        await stream.aclose()
        await until(lambda: cluster.service.in_flight == 0)
        await until(lambda: bool(cluster.received(Cancel)))
        gate.set()
        again = make_request(max_tokens=4)
        result = await cluster.run(again)
        assert result.tokens == oracle(again)
        assert len(cluster.received(Generate)) == 1
