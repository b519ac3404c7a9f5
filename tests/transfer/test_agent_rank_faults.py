"""Several ranks a side when something goes wrong: all ranks of a request hear of it, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest

from tests.transfer.agent_rig import HANDOFF, RUNS_ONLY, WAIT_S, Wire
from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.instance_rig import REQUEST, Cluster, Instances, RankNode, instances
from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    SessionEnded,
)
from transfer.identity import Incarnation
from transfer.inprocess import InProcessTransport, Network
from transfer.outcome import Outcome

LAYERS = (Attention(4), Attention(4))
WHOLE = Side(stages=(2,))
HALVES = Side(tp=2, stages=(2,))
STRIDES = Side(cp=2, stages=(2,))
PROMPT = 64
Make = Callable[[Side, Side], AbstractAsyncContextManager[Instances]]


def make(sender: Side, receiver: Side) -> AbstractAsyncContextManager[Instances]:
    return instances(same_model(sender, receiver, LAYERS), Random(3), PROMPT)


@pytest.fixture
async def fan_in() -> AsyncIterator[Instances]:
    """Two context ranks, one generation rank."""
    async with make(HALVES, WHOLE) as both:
        yield both


@pytest.fixture
async def fan_out() -> AsyncIterator[Instances]:
    """One context rank, two generation ranks."""
    async with make(WHOLE, HALVES) as both:
        yield both


@pytest.fixture
async def square() -> AsyncIterator[Instances]:
    """Two context ranks, two generation ranks, each with a session with each."""
    async with instances(
        same_model(Side(stages=(1, 1)), HALVES, LAYERS), Random(3), PROMPT
    ) as both:
        yield both


def freeze(node: RankNode) -> None:
    """Its data stands still."""
    assert isinstance(node.transport, InProcessTransport)
    node.transport.frozen = True


def thaw(node: RankNode) -> None:
    assert isinstance(node.transport, InProcessTransport)
    node.transport.frozen = False


async def outcomes(nodes: list[RankNode]) -> list[Outcome]:
    return [(await node.engine.expect(SessionEnded, REQUEST)).outcome for node in nodes]


async def under_way(both: Instances) -> None:
    """Half of the prompt is shipped on all ranks."""
    await both.announced()
    for node in both.generations:
        node.agent.ready(REQUEST, 0, both.end_block, node.lease(0, both.end_block))
    for node in both.contexts:
        node.agent.ship(REQUEST, 0, 4, node.lease(0, 4))


async def test_one_of_two_senders_dies(fan_in: Instances) -> None:
    freeze(fan_in.contexts[1])
    await under_way(fan_in)
    fan_in.contexts[1].kill()
    (generation,) = fan_in.generations
    assert await outcomes([generation]) == [Outcome.FAILED]
    # The other sender is told, and its pages go home.
    assert Outcome.SUCCEEDED not in await outcomes(fan_in.contexts[:1])
    await fan_in.contexts[0].leases_over()
    await generation.leases_over()
    assert not generation.engine.of(HandoffReceived, REQUEST)
    assert generation.agent.counters.failures == {"peer_lost": 1}


@pytest.mark.parametrize("who", ["receiver", "sender"])
async def test_one_rank_cancels(square: Instances, who: str) -> None:
    await under_way(square)
    node = (square.generations if who == "receiver" else square.contexts)[1]
    node.agent.cancel(REQUEST, "not wanted")
    await square.ended(Outcome.CANCELLED)
    for node in square.nodes:
        assert node.engine.of(SessionEnded, REQUEST)[0].reason == "not wanted"
        assert node.agent.counters.failures == {"cancelled": 1}


async def test_a_lease_is_in_doubt_for_one_sender_and_over_for_the_other() -> None:
    pair = same_model(STRIDES, WHOLE, LAYERS)
    # What the peer can reach by itself is in doubt when it is lost.
    network = Network(piece_bytes=512, lanes=("cuda_ipc",))
    cluster = Cluster(costs=RUNS_ONLY, transport=network.transport)
    async with instances(pair, Random(3), PROMPT, cluster) as both:
        (generation,) = both.generations
        freeze(both.contexts[1])
        await under_way(both)
        # The receives of the frozen sender are matched: it has told its chunk.
        await both.contexts[0].leases_over()
        both.contexts[1].kill()
        await generation.engine.expect(LeaseInDoubt, REQUEST)
        assert await outcomes([generation]) == [Outcome.FAILED]
        await both.contexts[0].engine.expect(SessionEnded, REQUEST)
        (lease,) = generation.leases
        assert (lease.quarantines, lease.releases) == (1, 0)
        assert generation.agent.counters.leases_in_doubt == 1
        generation.agent.peer_known_dead(both.contexts[1].info.incarnation)
        await generation.engine.expect(LeaseEnded, REQUEST)
        assert (lease.quarantines, lease.releases) == (1, 1)
        assert generation.agent.counters.leases_in_doubt == 0
        assert len(generation.engine.of(LeaseInDoubt, REQUEST)) == 1
        both.contexts[1].agent.peer_known_dead(generation.info.incarnation)


async def test_a_grant_that_never_comes_ends_by_the_deadline(fan_out: Instances) -> None:
    first, second = fan_out.generations
    fan_out.grant([first], deadline_ms=300)
    (context,) = fan_out.contexts
    end = await context.engine.expect(SessionEnded, REQUEST)
    assert Outcome.SUCCEEDED not in (end.outcome, *await outcomes([first]))
    assert "deadline" in end.reason
    assert not context.engine.of(GrantReceived, REQUEST)
    # The late one is told at once, and starts nothing.
    fan_out.grant([second], deadline_ms=60_000)
    assert Outcome.SUCCEEDED not in await outcomes([second])
    assert len(context.engine.of(SessionEnded, REQUEST)) == 1
    assert not context.engine.of(GrantReceived, REQUEST)


async def test_a_request_of_the_same_id_may_be_granted_again(fan_out: Instances) -> None:
    first, second = fan_out.generations
    (context,) = fan_out.contexts
    fan_out.grant([first], deadline_ms=60_000)
    while context.agent.counters.sessions_in_flight == 0:  # noqa: ASYNC110 (nothing is told)
        await asyncio.sleep(0.001)
    context.agent.cancel(REQUEST, "not wanted")
    await context.engine.expect(SessionEnded, REQUEST)
    await first.engine.expect(SessionEnded, REQUEST)
    fan_out.grant([first, second])
    await context.engine.expect(GrantReceived, REQUEST)


@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_cancelled_while_ranks_are_dialled(square: Instances, turns: int) -> None:
    node = square.generations[0]
    square.grant([node])
    for _ in range(turns):
        await asyncio.sleep(0)
    node.agent.cancel(REQUEST, "gone")
    end = await node.engine.expect(SessionEnded, REQUEST)
    assert (end.outcome, end.reason) == (Outcome.CANCELLED, "gone")
    assert node.agent.counters.sessions_in_flight == 0


@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_closed_while_ranks_are_dialled(square: Instances, turns: int) -> None:
    node = square.generations[0]
    square.grant([node])
    for _ in range(turns):
        await asyncio.sleep(0)
    await node.agent.close()
    (end,) = node.engine.of(SessionEnded, REQUEST)
    assert end.outcome is not Outcome.SUCCEEDED
    assert end.reason == "this worker is stopping"


async def test_cancelled_while_one_rank_is_connected_and_another_does_not_answer(
    fan_in: Instances,
) -> None:
    (node,) = fan_in.generations
    await node.agent.warm(fan_in.contexts[0].address)
    wire = Wire(fan_in.contexts[1].address)
    address = await wire.start()
    wire.stop_flow()
    node.agent.grant(REQUEST, (fan_in.contexts[0].address, address), PROMPT, 20_000)
    while not wire.connections:  # noqa: ASYNC110 (a connection raises no event here)
        await asyncio.sleep(0.001)
    node.agent.cancel(REQUEST, "gone")
    end = await node.engine.expect(SessionEnded, REQUEST)
    assert (end.outcome, end.reason) == (Outcome.CANCELLED, "gone")
    assert fan_in.contexts[0].agent.counters.sessions_total == 0
    await wire.close()


@pytest.mark.parametrize("stage", ["granted", "announced", "ready", "shipping", "early", "handed"])
@pytest.mark.parametrize("side", ["context", "generation"])
async def test_cancel_at_every_stage_ends_all_ranks(
    square: Instances, stage: str, side: str
) -> None:
    if stage == "granted":
        square.grant()
        for node in square.contexts:
            await node.engine.expect(GrantReceived, REQUEST)
    else:
        await square.announced()
    if stage in ("ready", "shipping", "handed"):
        square.ready(Random(1))
    if stage in ("shipping", "early", "handed"):
        square.ship(4)
    if stage == "handed":
        for node in square.contexts:
            freeze(node)
        square.hand_off()
    (square.contexts if side == "context" else square.generations)[0].agent.cancel(REQUEST, "gone")
    for node in square.contexts:
        thaw(node)
    for node in square.nodes:
        await node.engine.expect(SessionEnded, REQUEST)
        await node.leases_over()
    if stage != "handed":
        assert set(await outcomes(square.nodes)) == {Outcome.CANCELLED}


async def test_one_context_rank_is_not_there(fan_in: Instances) -> None:
    (generation,) = fan_in.generations
    await fan_in.contexts[1].agent.close()
    fan_in.grant()
    end = await generation.engine.expect(SessionEnded, REQUEST)
    assert end.outcome is Outcome.FAILED
    assert str(fan_in.contexts[1].info.rank_id) in end.reason
    assert fan_in.contexts[0].agent.counters.sessions_total == 0


async def test_one_context_rank_refuses(fan_in: Instances) -> None:
    (generation,) = fan_in.generations
    first, second = fan_in.sources
    stranger = second.model_copy(update={"incarnation": Incarnation.mint("other")})
    generation.agent.grant(REQUEST, (first, stranger), PROMPT, 20_000)
    end = await generation.engine.expect(SessionEnded, REQUEST)
    assert (end.outcome, "restarted" in end.reason) == (Outcome.FAILED, True)
    wrong = second.model_copy(update={"rank": 7})
    generation.agent.grant("wrong rank", (first, wrong), PROMPT, 20_000)
    end = await generation.engine.expect(SessionEnded, "wrong rank")
    assert "mind the addresses" in end.reason


async def test_the_ranks_of_a_request_are_all_of_a_group(fan_in: Instances) -> None:
    (generation,) = fan_in.generations
    for name, sources in (
        ("none", ()),
        ("half", fan_in.sources[:1]),
        ("twice", fan_in.sources[:1] * 2),
    ):
        generation.agent.grant(name, sources, PROMPT, 20_000)
        end = await generation.engine.expect(SessionEnded, name)
        assert (end.outcome, "ranks" in end.reason) == (Outcome.FAILED, True), end


async def test_another_rank_of_the_instance_is_another_peer(fan_in: Instances) -> None:
    """All ranks of an instance have one incarnation; connections are by rank."""
    (generation,) = fan_in.generations
    for address in fan_in.sources:
        await generation.agent.warm(address)
    assert set(generation.agent.lanes) == {str(node.info.rank_id) for node in fan_in.contexts}


async def test_nothing_to_decode_is_told_once(square: Instances) -> None:
    await square.announced()
    square.ready(Random(1))
    for node in square.contexts:
        node.agent.no_decode(REQUEST)
    await square.ended(Outcome.SUCCEEDED)
    for node in square.generations:
        assert len(node.engine.of(NoDecodeReceived, REQUEST)) == 1
        assert not node.engine.of(HandoffReceived, REQUEST)


async def test_some_hand_off_while_others_have_nothing_to_decode(fan_in: Instances) -> None:
    (generation,) = fan_in.generations
    await under_way(fan_in)
    first, second = fan_in.contexts
    first.agent.ship(REQUEST, 4, fan_in.end_block, first.lease(4, fan_in.end_block))
    first.agent.hand_off(REQUEST, HANDOFF)
    second.agent.no_decode(REQUEST)
    end = await generation.engine.expect(SessionEnded, REQUEST)
    assert (end.outcome, "nothing to decode" in end.reason) == (Outcome.FAILED, True)
    await generation.leases_over()


async def test_chunks_are_told_when_they_are_in_from_all(fan_in: Instances) -> None:
    (generation,) = fan_in.generations
    freeze(fan_in.contexts[1])
    await under_way(fan_in)
    await fan_in.contexts[0].leases_over()
    assert not generation.engine.of(ChunkReceived, REQUEST)
    thaw(fan_in.contexts[1])
    chunk = await generation.engine.expect(ChunkReceived, REQUEST)
    assert chunk.end_block == 4
    assert len(generation.engine.of(AnnounceReceived, REQUEST)) == 1


async def test_wrong_pages_fail_the_request_on_all_ranks(square: Instances) -> None:
    await square.announced()
    node = square.contexts[1]
    # Blocks are shipped in order, from the first one on.
    node.agent.ship(REQUEST, 2, 4, node.lease(2, 4))
    for other in square.nodes:
        end = await other.engine.expect(SessionEnded, REQUEST)
        assert end.outcome is not Outcome.SUCCEEDED
    await node.leases_over()


async def test_pages_given_twice_come_home_once(fan_out: Instances) -> None:
    await under_way(fan_out)
    (context,) = fan_out.contexts
    context.agent.ship(REQUEST, 0, 4, context.leases[0])
    end = await asyncio.wait_for(context.engine.expect(SessionEnded, REQUEST), WAIT_S)
    assert end.outcome is Outcome.FAILED
    await context.leases_over()
    assert len(context.engine.of(LeaseEnded, REQUEST)) == 1


async def test_closing_an_agent_ends_all_its_sessions(square: Instances) -> None:
    await under_way(square)
    await square.generations[0].agent.close()
    for node in square.nodes:
        end = await node.engine.expect(SessionEnded, REQUEST)
        assert end.outcome is not Outcome.SUCCEEDED
        await node.leases_over()
