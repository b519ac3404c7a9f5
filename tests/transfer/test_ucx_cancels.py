"""Requests that are cancelled, fail or run out of time over the real UCX, at every stage.

Whatever their moment: both ends end once, every page comes home, and the next request that gets
the same pages is right in every byte. Budget: 25 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from tests.transfer.agent_rig import WAIT_S, Lease, Node, lease
from tests.transfer.context_process import AT_HOME, ContextFacts
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import (
    RankProcess,
    complete,
    context_process,
    generation,
    is_right,
    is_stamped,
    stamp,
    start_request,
)
from tests.transfer.ucx_generations import (
    HoldingRank,
    all_home,
    context_here,
    generation_process,
)
from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.outcome import Outcome

pytestmark = pytest.mark.ucx
BLOCKS, HALF = 8, 4
FACTS = ContextFacts((128 << 10, 32 << 10), BLOCKS)
SLOTS = list(range(BLOCKS))
STAMP = 0x5A
TURNS = 40
"""Of the event loop, from a request's pages to its cancellation: it ends within about as many."""


async def test_the_request_after_a_cancelled_one_has_its_pages_and_none_of_its_bytes() -> None:
    """Five hundred rounds: B is granted as A is cancelled, and gets A's pages the moment they are
    free. It computes the first half itself and receives the rest. All of it is looked at when B has
    succeeded, and in every tenth round again once nothing is under way any more.
    """
    turns = np.random.default_rng(17).integers(0, TURNS, 500)
    cancelled = 0
    async with context_process(FACTS) as context, generation(FACTS.slot_bytes, BLOCKS) as node:
        for number, wait in enumerate(turns):
            a, b = f"a{number}#{number % BLOCKS}", f"b{number}#{(number + 3) % BLOCKS}"
            node.agent.grant(a, (context.address,), 10, 20_000)
            await node.engine.expect(AnnounceReceived, a)
            node.agent.ready(a, 0, BLOCKS, lease(0, SLOTS))
            for _ in range(wait):
                await asyncio.sleep(0)
            node.agent.cancel(a, "not wanted")
            node.agent.grant(b, (context.address,), 10, 20_000)
            await node.engine.expect(LeaseEnded, a)
            stamp(node, SLOTS[:HALF], STAMP)
            cancelled += node.engine.of(SessionEnded, a)[0].outcome is Outcome.CANCELLED
            await node.engine.expect(AnnounceReceived, b)
            node.agent.ready(b, HALF, BLOCKS, lease(HALF, SLOTS[HALF:]))
            await complete(node, b, SLOTS[HALF:], HALF)
            assert is_stamped(node, SLOTS[:HALF], STAMP)
            if number % 10 == 0:
                assert await context.home() == AT_HOME
                assert is_right(node, b, SLOTS[HALF:], HALF)
                assert is_stamped(node, SLOTS[:HALF], STAMP)
            node.engine.events.clear()
        print(f"{cancelled} of 500 cancelled before their end")
        assert cancelled > 100
        assert await context.home() == AT_HOME
        assert node.agent.counters.sessions_in_flight == 0


async def cancel_before_it_comes(node: Node, context: RankProcess, name: str) -> Lease | None:
    node.agent.cancel(name, "not wanted")
    node.agent.grant(name, (context.address,), 10, 20_000)
    return None


async def cancel_as_it_is_granted(node: Node, context: RankProcess, name: str) -> Lease | None:
    node.agent.grant(name, (context.address,), 10, 20_000)
    node.agent.cancel(name, "not wanted")
    return None


async def cancel_without_pages(node: Node, context: RankProcess, name: str) -> Lease | None:
    """A generation rank that has no room after all."""
    node.agent.grant(name, (context.address,), 10, 20_000)
    await node.engine.expect(AnnounceReceived, name)
    node.agent.cancel(name, "not wanted")
    return None


async def cancel_with_pages(node: Node, context: RankProcess, name: str) -> Lease | None:
    pages = await start_request(node, context, name, SLOTS)
    node.agent.cancel(name, "not wanted")
    return pages


async def cancel_after_a_chunk(node: Node, context: RankProcess, name: str) -> Lease | None:
    pages = await start_request(node, context, name, SLOTS)
    await node.engine.expect(ChunkReceived, name)
    node.agent.cancel(name, "not wanted")
    return pages


async def cancel_after_the_handoff(node: Node, context: RankProcess, name: str) -> Lease | None:
    pages = await start_request(node, context, name, SLOTS)
    await node.engine.expect(HandoffReceived, name)
    node.agent.cancel(name, "not wanted")
    return pages


STAGES: tuple[Callable[[Node, RankProcess, str], Awaitable[Lease | None]], ...] = (
    cancel_before_it_comes,
    cancel_as_it_is_granted,
    cancel_without_pages,
    cancel_with_pages,
    cancel_after_a_chunk,
    cancel_after_the_handoff,
)


async def test_a_generation_rank_cancels_at_every_stage() -> None:
    async with context_process(FACTS) as context, generation(FACTS.slot_bytes, BLOCKS) as node:
        for number in range(10 * len(STAGES)):
            stage = STAGES[number % len(STAGES)]
            name = f"{stage.__name__} {number}"
            pages = await stage(node, context, name)
            end = await node.engine.expect(SessionEnded, name)
            assert end.outcome in (Outcome.CANCELLED, Outcome.SUCCEEDED)
            if pages is not None:
                await node.engine.expect(LeaseEnded, name)
                assert (pages.releases, pages.quarantines) == (1, 0)
            stamp(node, SLOTS, STAMP)
            assert await context.home() == AT_HOME
            assert is_stamped(node, SLOTS, STAMP)
            assert len(node.engine.of(SessionEnded, name)) == 1
        await start_request(node, context, "last", SLOTS)
        await complete(node, "last", SLOTS)


@pytest.mark.parametrize("how", ["cancels", "fails"])
async def test_a_context_rank_that_gives_up_tells_the_other(how: str) -> None:
    """Before and behind its first chunk; and its own loop goes on."""
    async with context_here(FACTS, HoldingRank) as (rank, address, ends):
        async with generation_process(GenerationFacts(FACTS, address)) as receiver:
            for number in range(10):
                name = f"r {number}"
                receiver.process.order(f"start {name}")
                await receiver.process.line_of("ready", name)
                if number % 2:
                    rank.ship_chunk(name, 0)
                if how == "cancels":
                    rank.agent.cancel(name, "not wanted")
                else:
                    # A lease of other blocks than it names: the engine's own mistake.
                    rank.leases_out += 1
                    rank.agent.ship(name, 0, 1, lease(1, [0]))
                ended = await receiver.process.line_of("ended", name)
                assert ("not wanted" if how == "cancels" else "sender failed") in ended
                await receiver.process.line_of("home", name)
                assert ("cancelled" if how == "cancels" else "failed") in await ends.of(name)
            receiver.process.order("start last#3")
            await receiver.process.line_of("ready last#3")
            rank.ship("last#3")
            assert "succeeded" in await receiver.process.line_of("ended last#3")
            assert await receiver.home() == AT_HOME
        assert await all_home(rank) == AT_HOME


async def started(node: Node, name: str) -> None:
    """The request is announced, or over before that."""
    kinds = SessionEnded | AnnounceReceived
    async with asyncio.timeout(WAIT_S):
        while not any(  # noqa: ASYNC110 (whichever comes)
            event.request_id == name and isinstance(event, kinds) for event in node.engine.events
        ):
            await asyncio.sleep(0)


async def test_deadlines_of_a_few_ms_end_requests_and_spoil_none() -> None:
    """Two hundred requests: in time and right in every byte, or failed and never written to."""
    random = np.random.default_rng(16)
    outcomes: list[Outcome] = []
    async with context_process(FACTS) as context, generation(FACTS.slot_bytes, BLOCKS) as node:
        await node.agent.warm(context.address)
        for number in range(200):
            name = f"r{number}#{number % BLOCKS}"
            stamp(node, SLOTS, STAMP)
            node.agent.grant(name, (context.address,), 10, int(random.integers(1, 16)))
            await started(node, name)
            node.agent.ready(name, 0, BLOCKS, pages := lease(0, SLOTS))
            end = await node.engine.expect(SessionEnded, name)
            await node.engine.expect(LeaseEnded, name)
            outcomes.append(end.outcome)
            assert (pages.releases, pages.quarantines) == (1, 0)
            if end.outcome is Outcome.SUCCEEDED:
                assert is_right(node, name, SLOTS)
            stamp(node, SLOTS, STAMP)
            assert await context.home() == AT_HOME
            assert is_stamped(node, SLOTS, STAMP)
            assert len(node.engine.of(SessionEnded, name)) == 1
            node.engine.events.clear()
        await start_request(node, context, "last", SLOTS)
        await complete(node, "last", SLOTS)
    print({outcome.value: outcomes.count(outcome) for outcome in set(outcomes)})
    assert set(outcomes) == {Outcome.SUCCEEDED, Outcome.FAILED}
