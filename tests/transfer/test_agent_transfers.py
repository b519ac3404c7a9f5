"""Agents over the in-process transport: what arrives, who is told what, what cancelling leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.transfer.agent_rig import (
    HANDOFF,
    WAIT_S,
    Node,
    NodeFacts,
    Transfer,
    fill,
    granted,
    lease,
    same_blocks,
    start_node,
)
from tests.transfer.transfer_moments import cancel_at
from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    NoDecodeReceived,
    SessionEnded,
)
from transfer.inprocess import Network
from transfer.outcome import Outcome

BLOCK_BYTES = 4096 + 1024 + 2048


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node]]:
    """A context node and a generation node."""
    network = Network(piece_bytes=512)
    facts = NodeFacts(num_slots=512)
    context = await start_node("context", network.transport("a"), facts)
    generation = await start_node("generation", network.transport("b"), facts)
    yield context, generation
    for node in (generation, context):
        await node.agent.close()
        assert node.agent.counters.sessions_in_flight == 0
        assert node.agent.counters.leases_in_doubt == 0


async def test_pages_handoff_and_counts_arrive(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    # Slots 20 and 21 follow each other on both sides: one message a pool.
    await Transfer("r", [3, 4, 20, 21, 9], [30, 31, 7, 8, 5]).run(context, generation)
    for node in nodes:
        end = node.engine.of(SessionEnded, "r")
        assert [(e.transferred_bytes, e.transferred_blocks) for e in end] == [(5 * BLOCK_BYTES, 5)]
        assert node.agent.counters.bytes_total == 5 * BLOCK_BYTES
        assert node.agent.counters.gb_per_s > 0
    chunks = generation.engine.of(ChunkReceived, "r")
    assert [chunk.end_block for chunk in chunks] == [2, 4, 5]
    assert context.agent.lanes == {str(generation.info.rank_id): "self"}


async def test_many_sessions_at_once(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    order = np.random.default_rng(1).permutation(512).tolist()
    target = np.random.default_rng(2).permutation(512).tolist()
    transfers = [
        Transfer(f"{'r' * (n + 1)}", order[8 * n : 8 * n + 8], target[8 * n : 8 * n + 8])
        for n in range(50)
    ]
    await asyncio.gather(*(one.run(context, generation) for one in transfers))
    assert context.agent.counters.sessions_total == 50


async def test_blocks_the_receiver_holds_are_not_sent(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    source = [10, 11, 12, 13]
    fill(context.memory, source, 5)
    await granted(context, generation, "r", 20_000)
    # The receiver lacks blocks 2 and 3, and of the windowed group only block 3.
    generation.agent.ready("r", 2, 4, lease(2, [40, 41], [-1, 41]))
    context.agent.ship("r", 0, 4, lease(0, source))
    context.agent.hand_off("r", HANDOFF)
    await generation.engine.expect(HandoffReceived, "r")
    end = await context.engine.expect(SessionEnded, "r")
    assert end.transferred_bytes == 2 * (4096 + 1024) + 2048
    pools, arrived = context.memory.pools, generation.memory.pools
    assert np.array_equal(pools[0, 0][[12, 13]], arrived[0, 0][[40, 41]])
    assert np.array_equal(pools[1, 0][13], arrived[1, 0][41])
    assert not arrived[1, 0][40].any()


async def test_chunks_may_be_final_before_the_receivers_pages(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    transfer = Transfer("r", [1, 2, 3], [4, 5, 6])
    fill(context.memory, transfer.source_slots, 1)
    await granted(context, generation, "r", 20_000)
    transfer.ship(context)
    context.agent.hand_off("r", HANDOFF)
    transfer.give_pages(generation)
    await generation.engine.expect(HandoffReceived, "r")
    await transfer.ended(context, generation, Outcome.SUCCEEDED)
    assert same_blocks(context, [1, 2, 3], generation, [4, 5, 6])


async def test_nothing_to_decode_frees_pages_unread(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    transfer = Transfer("r", [], [1, 2])
    await granted(context, generation, "r", 20_000)
    transfer.give_pages(generation)
    context.agent.no_decode("r")
    await generation.engine.expect(NoDecodeReceived, "r")
    await transfer.ended(context, generation, Outcome.SUCCEEDED)


@pytest.mark.parametrize("stage", ["granted", "announced", "ready", "shipping", "early"])
@pytest.mark.parametrize("who", ["context", "generation", "both"])
async def test_cancel_at_every_stage_ends_both_sides(
    nodes: tuple[Node, Node], stage: str, who: str
) -> None:
    context, generation = nodes
    transfer = Transfer("r", [1, 2, 3, 4], [11, 12, 13, 14], chunk_blocks=1)
    await cancel_at(stage, who, transfer, context, generation)
    await transfer.ended(context, generation, Outcome.CANCELLED)
    await Transfer("next", [1, 2, 3, 4], [11, 12, 13, 14]).run(context, generation)


async def test_pages_of_a_cancelled_transfer_are_clean_for_the_next(
    nodes: tuple[Node, Node],
) -> None:
    """No byte of a cancelled transfer lands after its lease has ended."""
    context, generation = nodes
    slots = list(range(100, 164))
    for number in range(20):
        name = f"cancelled {number}"
        transfer = Transfer(name, list(range(64)), slots, chunk_blocks=16)
        fill(context.memory, transfer.source_slots, number)
        await granted(context, generation, name, 20_000)
        transfer.give_pages(generation)
        transfer.ship(context)
        for _ in range(number):
            await asyncio.sleep(0)
        generation.agent.cancel(name, "not wanted")
        await generation.engine.expect(LeaseEnded, name)
        for array in generation.memory.pools.values():
            array[slots] = 255 - number
        await transfer.ended(context, generation, Outcome.CANCELLED)
        for array in generation.memory.pools.values():
            assert (array[slots] == 255 - number).all()


async def test_verbs_may_come_from_another_thread(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    transfer = Transfer("r", [1, 2], [3, 4])
    fill(context.memory, [1, 2], 1)
    await asyncio.to_thread(generation.agent.grant, "r", (context.address,), 100, 20_000)
    await context.engine.expect(GrantReceived, "r")
    await asyncio.to_thread(context.agent.announce, "r")
    await generation.engine.expect(AnnounceReceived, "r")
    await asyncio.to_thread(transfer.give_pages, generation)
    await asyncio.to_thread(transfer.ship, context)
    await asyncio.to_thread(context.agent.hand_off, "r", HANDOFF)
    await transfer.ended(context, generation, Outcome.SUCCEEDED)


async def test_cancel_before_the_request_is_remembered(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    generation.agent.cancel("mine", "gone")
    generation.agent.grant("mine", (context.address,), 10, 20_000)
    end = await generation.engine.expect(SessionEnded, "mine")
    assert (end.outcome, end.reason) == (Outcome.CANCELLED, "gone")
    context.agent.cancel("theirs", "gone")
    generation.agent.grant("theirs", (context.address,), 10, 20_000)
    for node in nodes:
        end = await node.engine.expect(SessionEnded, "theirs")
        assert end.outcome is Outcome.CANCELLED


async def test_cancel_while_the_peer_is_dialled(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    for number in range(6):
        name = f"r{number}"
        generation.agent.grant(name, (context.address,), 10, 20_000)
        for _ in range(number):
            await asyncio.sleep(0)
        generation.agent.cancel(name, "gone")
        end = await generation.engine.expect(SessionEnded, name)
        assert (end.outcome, end.reason) == (Outcome.CANCELLED, "gone")
    await Transfer("next", [1], [2]).run(context, generation)


async def test_deadlines_pass_without_traffic(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    generation.agent.grant("r", (context.address,), 10, 300)
    await context.engine.expect(GrantReceived, "r")
    ends = [await node.engine.expect(SessionEnded, "r") for node in nodes]
    # Whichever side's clock is first fails and tells the other, which may then end as cancelled.
    assert Outcome.FAILED in {end.outcome for end in ends}
    assert Outcome.SUCCEEDED not in {end.outcome for end in ends}
    for end in ends:
        assert "deadline" in end.reason
    failures = [node.agent.counters.failures["deadline"] for node in nodes]
    assert sum(failures) >= 1


async def test_a_granted_request_ends_once_per_side(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    await Transfer("r", [1], [2]).run(context, generation)
    context.agent.cancel("r", "late")
    generation.agent.cancel("r", "late")
    context.agent.announce("r")
    late = lease(0, [5])
    context.agent.ship("r", 0, 1, late)
    generation.agent.ready("r", 0, 1, late)
    await context.engine.expect(LeaseEnded, "r", 2)
    await generation.engine.expect(LeaseEnded, "r", 2)
    assert late.releases == 2
    for node in nodes:
        assert len(node.engine.of(SessionEnded, "r")) == 1


async def test_a_cancel_that_crosses_the_end_spares_the_next_session_of_that_id(
    nodes: tuple[Node, Node],
) -> None:
    context, generation = nodes
    await Transfer("r", [1], [2]).run(context, generation)
    for node in nodes:
        node.agent.cancel("r", "crossed the end")
    generation.agent.grant("r", (context.address,), 10, 20_000)
    await context.engine.expect(GrantReceived, "r", 2)
    context.agent.announce("r")
    await generation.engine.expect(AnnounceReceived, "r", 2)
    generation.agent.ready("r", 0, 1, lease(0, [2]))
    context.agent.no_decode("r")
    for node in nodes:
        end = await node.engine.expect(SessionEnded, "r", 2)
        assert end.outcome is Outcome.SUCCEEDED, end.reason


async def test_misuse_fails_the_request_and_returns_the_lease(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    await granted(context, generation, "r", 20_000)
    wrong = lease(0, [1, 2])
    generation.agent.ready("r", 0, 3, wrong)
    await generation.engine.expect(LeaseEnded, "r")
    end = await generation.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    assert "[0, 3)" in end.reason
    assert wrong.releases == 1
    await context.engine.expect(SessionEnded, "r")


async def test_closing_an_agent_ends_what_it_has(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    transfer = Transfer("r", [1, 2], [3, 4])
    await granted(context, generation, "r", 20_000)
    transfer.give_pages(generation)
    await generation.agent.close()
    await asyncio.wait_for(generation.agent.close(), WAIT_S)
    end = await context.engine.expect(SessionEnded, "r")
    assert end.outcome in (Outcome.FAILED, Outcome.CANCELLED)
    await generation.engine.expect(SessionEnded, "r")
    await generation.engine.expect(LeaseEnded, "r")
