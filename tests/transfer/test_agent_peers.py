"""Who may connect, who fits, and what the loss of a peer means for pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
from typing_extensions import override

from tests.transfer.agent_rig import (
    HANDOFF,
    TOKEN,
    WAIT_S,
    Node,
    NodeFacts,
    Transfer,
    granted,
    start_node,
)
from tests.transfer.peer_world import World
from tests.transfer.transfer_moments import to_mid_transfer
from transfer.agent_events import (
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.agent_pair import LATE_S
from transfer.auth import mint_nonce, proof
from transfer.control import UNPROVED_FRAME_BYTES
from transfer.identity import Incarnation
from transfer.inprocess import InProcessTransport
from transfer.messages import CONTROL_CODEC, Challenge, Hello, PeerRefused, Welcome
from transfer.outcome import Outcome
from transfer.transport import Expectation, TransportError
from transfer.wire import HEADER, MAGIC, PROTOCOL_VERSION

Start = Callable[..., Awaitable[Node]]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


@pytest.fixture
async def ipc_world() -> AsyncIterator[World]:
    """Lanes over which a peer's device can reach pages by itself."""
    made = World(lanes=("cuda_ipc",))
    yield made
    await made.close()


async def failed(generation: Node, context: Node, request_id: str = "r") -> str:
    """Grant a request and return why it failed."""
    generation.agent.grant(request_id, (context.address,), 10, 20_000)
    end = await generation.engine.expect(SessionEnded, request_id)
    assert end.outcome is Outcome.FAILED
    return end.reason


async def test_a_wrong_token_is_refused_at_once(world: World) -> None:
    context = await world.node("context")
    stranger = await world.node("stranger", NodeFacts(token="another token"))
    wire = await world.wire(context)
    assert "PAGEFERRY_CLUSTER_TOKEN" in await failed(stranger, context)
    assert not context.engine.events
    assert wire.connections == 1
    generation = await world.node("generation")
    await Transfer("good", [1], [2]).run(context, generation)


async def test_both_sides_must_prove_the_token(world: World) -> None:
    """A dialler sends its facts only to a listener that knows the token."""
    generation = await world.node("generation")
    heard: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        CONTROL_CODEC.write(writer, [Challenge(nonce=mint_nonce())])
        assert isinstance(await CONTROL_CODEC.read(reader), Hello)
        CONTROL_CODEC.write(writer, [Welcome(proof=bytes(32))])
        heard.append(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = generation.address.model_copy(
        update={"control_port": server.sockets[0].getsockname()[1]}
    )
    generation.agent.grant("r", (address,), 10, 20_000)
    end = await generation.engine.expect(SessionEnded, "r")
    assert "PAGEFERRY_CLUSTER_TOKEN" in end.reason
    server.close()
    messages = CONTROL_CODEC.decode(heard[0])
    assert isinstance(messages, PeerRefused)


async def test_nothing_large_is_read_from_strangers(world: World) -> None:
    context = await world.node("context")
    for frame in (
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(MAGIC, PROTOCOL_VERSION, UNPROVED_FRAME_BYTES + 1),
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 4) + b"\xff" * 4,
    ):
        reader, writer = await asyncio.open_connection(
            context.address.host, context.address.control_port
        )
        assert isinstance(await CONTROL_CODEC.read(reader), Challenge)
        writer.write(frame)
        rest = await asyncio.wait_for(reader.read(), WAIT_S)
        assert isinstance(CONTROL_CODEC.decode(rest), PeerRefused)
        writer.close()
    generation = await world.node("generation")
    await Transfer("good", [1], [2]).run(context, generation)


async def test_a_proof_cannot_be_reflected(world: World) -> None:
    context = await world.node("context")
    reader, writer = await asyncio.open_connection(
        context.address.host, context.address.control_port
    )
    challenge = await CONTROL_CODEC.read(reader)
    assert isinstance(challenge, Challenge)
    wrong_side = proof(TOKEN, b"context", challenge.nonce)
    CONTROL_CODEC.write(writer, [Hello(proof=wrong_side, nonce=mint_nonce())])
    assert isinstance(await CONTROL_CODEC.read(reader), PeerRefused)
    writer.close()


async def test_a_wrong_opening_delivers_no_data(world: World) -> None:
    """A peer that was proved but dials the wrong listener, or a stranger, gets no endpoint."""
    context = await world.node("context")
    generation = await world.node("generation")
    expectation = await generation.transport.expect(mint_nonce())
    stranger = world.network.transport("stranger")
    await stranger.start()
    with pytest.raises(TransportError, match="refused"):
        await stranger.connect(expectation.address, mint_nonce(), timeout_s=1)
    assert not expectation.endpoint.done()
    await Transfer("r", [1], [2]).run(context, generation)


async def test_another_protocol_version_is_refused_with_both_numbers(world: World) -> None:
    context = await world.node("context")
    generation = await world.node("generation")
    other = PROTOCOL_VERSION + 1
    told: list[bytes] = []

    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEADER.pack(MAGIC, other, 0))
        told.append(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(newer, "127.0.0.1", 0)
    address = context.address.model_copy(
        update={"control_port": server.sockets[0].getsockname()[1]}
    )
    generation.agent.grant("r", (address,), 10, 20_000)
    end = await generation.engine.expect(SessionEnded, "r")
    assert f"ours is {PROTOCOL_VERSION}, the peer's is {other}" in end.reason
    # The other side can read our number in the header of what it is told.
    assert HEADER.unpack(told[0][: HEADER.size])[1] == PROTOCOL_VERSION
    server.close()
    reader, writer = await asyncio.open_connection(
        context.address.host, context.address.control_port
    )
    await CONTROL_CODEC.read(reader)
    writer.write(HEADER.pack(MAGIC, other, 0))
    refusal = await CONTROL_CODEC.read(reader)
    assert isinstance(refusal, PeerRefused)
    assert f"ours is {PROTOCOL_VERSION}, the peer's is {other}" in refusal.reasons[0]
    writer.close()


async def test_a_pair_that_does_not_fit_is_refused_once_with_all_reasons(world: World) -> None:
    context = await world.node("context")
    wire = await world.wire(context)
    generation = await world.node("generation", NodeFacts(tokens_per_block=32))
    reason = await failed(generation, context, "first")
    assert "tokens_per_block: ours is 32, the peer's is 16" in reason
    assert await failed(generation, context, "second")
    assert wire.connections == 1
    (here,) = generation.agent.refusals.values()
    (there,) = context.agent.refusals.values()
    assert len(here) == len(there) > 1
    assert any("ours is 16, the peer's is 32" in row for row in there)
    assert not context.engine.events


@pytest.mark.parametrize("what", ["its death is told", "it comes back and fits"])
async def test_a_refusal_is_forgotten_with_the_process_that_it_was_about(
    world: World, what: str
) -> None:
    misfit = await world.node("context", NodeFacts(tokens_per_block=32))
    generation = await world.node("generation")
    other = await world.node("generation of another kind", NodeFacts(tokens_per_block=32))
    assert "tokens_per_block" in await failed(generation, misfit, "first")
    before = generation.agent.refusals
    assert set(before) == {str(misfit.info.rank_id)}
    assert set(misfit.agent.refusals) == {str(generation.info.rank_id)}
    await misfit.agent.close()
    if what == "its death is told":
        generation.agent.peer_known_dead(misfit.info.incarnation)
        again = await world.node("another context")
    else:
        again = await world.node("context", NodeFacts(control_port=misfit.address.control_port))
    await Transfer("r", [1], [2]).run(again, generation)
    assert generation.agent.refusals == {}
    assert "tokens_per_block" in await failed(other, again)
    assert set(before) == {str(misfit.info.rank_id)}, "what was read before has changed"


async def test_a_restarted_worker_at_the_same_address_is_not_its_predecessor(
    world: World,
) -> None:
    context = await world.node("context")
    generation = await world.node("generation")
    await Transfer("r", [1], [2]).run(context, generation)
    await context.agent.close()
    facts = NodeFacts(control_port=context.address.control_port)
    again = await world.node("context", facts)
    assert "restarted" in await failed(generation, context, "to the old one")
    await Transfer("to the new one", [1], [2]).run(again, generation)


async def test_dialling_its_predecessor_costs_a_restarted_worker_nothing(world: World) -> None:
    context, generation = await world.node("context"), await world.node("generation")
    await granted(context, generation, "under way", 20_000)
    other = Incarnation.mint("context")
    before = context.address.model_copy(update={"incarnation": other})
    generation.agent.grant("to the old one", (before,), 100, 20_000)
    end = await generation.engine.expect(SessionEnded, "to the old one")
    assert "the worker was restarted" in end.reason
    neighbour = context.address.model_copy(update={"rank": 1})
    generation.agent.grant("to another rank", (neighbour,), 100, 20_000)
    end = await generation.engine.expect(SessionEnded, "to another rank")
    assert "mind the addresses" in end.reason
    # Messages of a pair are ordered: what was under way goes on over the connection it had.
    context.agent.no_decode("under way")
    for node in (context, generation):
        end = await node.engine.expect(SessionEnded, "under way")
        assert end.outcome is Outcome.SUCCEEDED, end.reason


async def test_nobody_there_fails_at_once(world: World) -> None:
    context = await world.node("context")
    generation = await world.node("generation")
    await context.agent.close()
    assert await failed(generation, context)
    assert generation.agent.counters.failures["connect"] == 1


@pytest.mark.parametrize("host", ["two..dots", "x" * 64 + ".y", "with\0nothing"])
async def test_a_request_for_a_host_that_is_no_name_ends(world: World, host: str) -> None:
    context, generation = await world.node("context"), await world.node("generation")
    context.address = context.address.model_copy(update={"host": host})
    assert await failed(generation, context)
    with pytest.raises(ConnectionError):
        await generation.agent.warm(context.address)


async def test_a_request_ends_whatever_becomes_of_its_dial(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(InProcessTransport):
        @override
        async def expect(self, opening: bytes) -> Expectation:
            raise LookupError("no listener at all")

    context = await world.node("context")
    generation = await start_node("generation", Broken(world.network, "broken"))
    assert "no listener at all" in await failed(generation, context)
    assert "could not be opened" in caplog.text
    await generation.agent.close()


async def test_warming_connects_ahead(world: World) -> None:
    context = await world.node("context")
    wire = await world.wire(context)
    generation = await world.node("generation")
    await generation.agent.warm(context.address)
    assert generation.agent.lanes == {str(context.info.rank_id): "self"}
    await Transfer("r", [1], [2]).run(context, generation)
    assert wire.connections == 1
    with pytest.raises(ConnectionError):
        await generation.agent.warm(
            context.address.model_copy(update={"incarnation": generation.info.incarnation})
        )


async def in_mid_transfer(world: World) -> tuple[Node, Node, Transfer]:
    """A request whose first chunk is in and whose second one is under way."""
    context = await world.node("context")
    await world.wire(context)
    generation = await world.node("generation")
    transfer = Transfer("r", list(range(40)), list(range(10, 50)), chunk_blocks=20)
    await to_mid_transfer(context, generation, transfer)
    return context, generation, transfer


def kill(world: World, node: Node) -> None:
    """What SIGKILL of the node's process shows to others."""
    assert isinstance(node.transport, InProcessTransport)
    world.network.kill(node.transport)
    for wire in world.wires:
        wire.cut()


async def test_a_dead_sender_fails_the_request_and_frees_the_pages(world: World) -> None:
    context, generation, transfer = await in_mid_transfer(world)
    kill(world, context)
    end = await generation.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    await generation.engine.expect(LeaseEnded, "r")
    assert transfer.target is not None
    assert transfer.target.releases == 1
    assert not generation.engine.of(HandoffReceived, "r")
    assert generation.agent.counters.failures["peer_lost"] == 1


async def test_a_dead_receiver_fails_the_request_and_frees_the_pages(world: World) -> None:
    context, generation, transfer = await in_mid_transfer(world)
    kill(world, generation)
    end = await context.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    await context.engine.expect(LeaseEnded, "r", len(transfer.sent))
    assert all(chunk.releases == 1 for chunk in transfer.sent)


async def test_where_a_peer_can_reach_pages_only_its_death_ends_the_doubt(
    ipc_world: World,
) -> None:
    context, generation, transfer = await in_mid_transfer(ipc_world)
    kill(ipc_world, context)
    await generation.engine.expect(LeaseInDoubt, "r")
    assert transfer.target is not None
    assert (transfer.target.quarantines, transfer.target.releases) == (1, 0)
    assert generation.agent.counters.leases_in_doubt == 1
    generation.agent.peer_known_dead(generation.info.incarnation)
    generation.agent.peer_known_dead(context.info.incarnation)
    await generation.engine.expect(LeaseEnded, "r")
    assert transfer.target.releases == 1
    assert generation.agent.counters.leases_in_doubt == 0
    assert "dead" in await failed(generation, context, "later")


async def test_death_told_before_the_connection_breaks(ipc_world: World) -> None:
    context, generation, transfer = await in_mid_transfer(ipc_world)
    generation.agent.peer_known_dead(context.info.incarnation)
    await generation.engine.expect(SessionEnded, "r")
    await generation.engine.expect(LeaseEnded, "r")
    assert not generation.engine.of(LeaseInDoubt, "r")
    assert transfer.target is not None
    assert transfer.target.releases == 1


async def test_a_returning_peer_ends_the_doubt_on_both_sides(ipc_world: World) -> None:
    context, generation, transfer = await in_mid_transfer(ipc_world)
    ipc_world.wires[0].cut()
    await generation.engine.expect(LeaseInDoubt, "r")
    await Transfer("next", [60, 61], [62, 63]).run(context, generation)
    await generation.engine.expect(LeaseEnded, "r")
    await context.engine.expect(LeaseEnded, "r", len(transfer.sent))
    for node in (context, generation):
        assert node.agent.counters.leases_in_doubt == 0
        assert node.agent.counters.sessions_in_flight == 0


async def test_a_silent_peer_is_lost_by_missed_heartbeats(world: World) -> None:
    context = await world.node("context")
    wire = await world.wire(context)
    generation = await world.node("generation")
    generation.agent.grant("r", (context.address,), 10, 20_000)
    await context.engine.expect(GrantReceived, "r")
    started = asyncio.get_running_loop().time()
    wire.stop_flow()
    ends = [await node.engine.expect(SessionEnded, "r") for node in (context, generation)]
    assert any("no word from the peer" in end.reason for end in ends)
    assert asyncio.get_running_loop().time() - started < 3
    wire.resume_flow()
    await Transfer("next", [1], [2]).run(context, generation)
    assert wire.connections == 2


async def test_an_idle_connection_is_kept_by_heartbeats(world: World) -> None:
    context = await world.node("context")
    wire = await world.wire(context)
    generation = await world.node("generation")
    await generation.agent.warm(context.address)
    await asyncio.sleep(1.5)
    await Transfer("r", [1], [2]).run(context, generation)
    assert wire.connections == 1


async def test_frozen_data_is_ended_by_the_deadline_and_the_pair_reconnects(
    world: World,
) -> None:
    """Control messages flow, page data does not: deadlines find it, memory waits for the end."""
    context, generation, transfer = await in_mid_transfer_frozen(world)
    end = await generation.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    assert isinstance(context.transport, InProcessTransport)
    await generation.engine.expect(LeaseEnded, "r")
    assert transfer.target is not None
    assert transfer.target.releases == 1
    context.transport.frozen = False
    await Transfer("next", [60, 61], [62, 63]).run(context, generation)


async def test_deadlines_that_pass_while_this_process_stands_still_let_it_read_first(
    world: World,
) -> None:
    """What the peers said meanwhile waits unread; it comes a little after the late timers."""
    context, generation, transfer = await in_mid_transfer_frozen(world)
    for _ in range(20):
        await asyncio.sleep(0.001)
    time.sleep(2 * LATE_S)  # noqa: ASYNC251  holds up the event loop on purpose
    await asyncio.sleep(0.01)
    assert isinstance(context.transport, InProcessTransport)
    context.transport.frozen = False
    context.agent.hand_off("r", HANDOFF)
    await generation.engine.expect(HandoffReceived, "r")
    await transfer.ended(context, generation, Outcome.SUCCEEDED)


async def in_mid_transfer_frozen(world: World) -> tuple[Node, Node, Transfer]:
    from transfer.deadlines import TransferLimits

    facts = NodeFacts(limits=TransferLimits(floor_ms=200, drain_ms=200))
    context = await world.node("context", facts)
    generation = await world.node("generation", facts)
    transfer = Transfer("r", list(range(40)), list(range(10, 50)))
    await granted(context, generation, "r", 20_000)
    assert isinstance(context.transport, InProcessTransport)
    context.transport.frozen = True
    transfer.give_pages(generation)
    transfer.ship(context)
    return context, generation, transfer


async def test_a_dead_transport_drops_its_peers_and_says_so(world: World) -> None:
    context, generation, _ = await in_mid_transfer(world)
    assert isinstance(generation.transport, InProcessTransport)
    generation.transport.fail("driver thread died")
    assert generation.agent.failure == "driver thread died"
    end = await generation.engine.expect(SessionEnded, "r")
    assert "driver thread died" in end.reason
    await context.engine.expect(SessionEnded, "r")


async def test_late_writes_never_reach_a_new_owner(world: World) -> None:
    """Kill a sender mid-transfer, reuse the pages at once, look at every byte later."""
    context, generation, transfer = await in_mid_transfer(world)
    kill(world, context)
    await generation.engine.expect(LeaseEnded, "r")
    for array in generation.memory.pools.values():
        array[transfer.target_slots] = 99
    for _ in range(200):
        await asyncio.sleep(0)
    for array in generation.memory.pools.values():
        assert np.all(array[transfer.target_slots] == 99)
