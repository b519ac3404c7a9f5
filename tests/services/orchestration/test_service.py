"""The orchestrator against real TCP connections to fake workers."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestration.api import TokenDelta
from tests.services.orchestration.rig import (
    Collected,
    make_request,
    oracle,
    pair,
    rig,
    until,
)
from tests.support.fake_tokens import fake_token
from tests.support.fake_worker import FakeScript, FakeWorker
from worker.messages import Generate, Prefill


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_disaggregated_request_completes_with_every_token(max_tokens: int, n: int) -> None:
    async with rig(pair()) as cluster:
        request = make_request(max_tokens=max_tokens, n=n, logprobs=2)
        result = await cluster.run(request)
        assert result.tokens == oracle(request)
        assert result.logprobs == n * max_tokens
        assert result.finished == dict.fromkeys(range(n), "length")
        completed = result.completed()
        assert completed.completion_tokens == (max_tokens,) * n
        assert completed.cached_tokens == 0
        assert not completed.repaired
        assert len(cluster.received(Prefill)) == 1
        assert len(cluster.received(Generate)) == (0 if max_tokens == 1 else 1)
        assert completed.transferred_bytes == (0 if max_tokens == 1 else 1000)
        assert (
            cluster.metric("pageferry_requests_total", endpoint="completions", outcome="completed")
            == 1
        )


async def test_cached_tokens_are_those_of_the_context_leg() -> None:
    async with rig(pair()) as cluster:
        request = make_request(length=200)
        assert (await cluster.run(request)).completed().cached_tokens == 0
        longer = make_request(length=300)
        assert (await cluster.run(longer)).completed().cached_tokens == 192


async def test_delayed_context_connection_does_not_delay_or_repeat_token_one() -> None:
    slow = FakeScript(output_delay_s=0.3)
    async with rig(pair(context=slow)) as cluster:
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        started = asyncio.get_running_loop().time()
        first = await anext(aiter(stream))
        assert isinstance(first, TokenDelta)
        assert asyncio.get_running_loop().time() - started < 0.25
        result = Collected(1)
        result.tokens[0].extend(first.tokens)
        await result.read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().cached_tokens == 0


async def test_first_token_that_ends_every_choice_needs_no_decode() -> None:
    async with rig(pair()) as cluster:
        probe = make_request(max_tokens=9)
        ending = fake_token(probe.tokens, 7, 0, 0)
        result = await cluster.run(make_request(max_tokens=9, stop_token_ids=(ending,)))
        assert result.tokens == [[ending]]
        assert result.finished == {0: "stop"}
        assert result.completed().transferred_bytes == 0


async def test_one_of_several_choices_ends_with_its_first_token() -> None:
    async with rig(pair()) as cluster:
        probe = make_request(max_tokens=4, n=3)
        ending = fake_token(probe.tokens, 7, 1, 0)
        result = await cluster.run(make_request(max_tokens=4, n=3, stop_token_ids=(ending,)))
        expected = oracle(probe)
        assert result.tokens == [expected[0], expected[1][:1], expected[2]]
        assert result.finished == {0: "length", 1: "stop", 2: "length"}


async def test_a_context_worker_is_told_who_holds_a_prefix_that_it_lacks() -> None:
    workers = pair()
    workers.append(FakeWorker("context-1", "context", transfers=workers[0].transfers))
    async with rig(workers) as cluster:
        await cluster.run(make_request(length=400))
        (first,) = cluster.received(Prefill)
        assert first.prefix_source is None
        served = next(worker for worker in workers if first in worker.received)
        cluster.workers.remove(served)
        cluster.publish()
        await until(lambda: cluster.state(served.incarnation.instance) == "gone")
        await cluster.run(make_request(length=500))
        (second,) = cluster.received(Prefill)
        generation = workers[1].incarnation
        assert second.prefix_source is not None
        assert second.prefix_source.peer.incarnation == generation
        assert second.prefix_source.tokens == 384
