"""Agents that stage: other pages on either side, scattered slots, few buffers, dead peers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from typing_extensions import override

from tests.transfer.agent_rig import (
    GROUPS,
    HANDOFF,
    Node,
    NodeFacts,
    Transfer,
    UnstagedMemory,
    fill,
    granted,
    lease,
    start_node,
)
from tests.transfer.device_memory import DeviceMemory
from tests.transfer.transfer_moments import cancel_at, to_mid_transfer
from transfer import staged_cut, staging_buffers
from transfer.agent_events import (
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.inprocess import InProcessTransport, Network
from transfer.outcome import Outcome
from worker.device_staging import HostDevice, PassEnd

BLOCK_BYTES = 4096 + 1024 + 2048
BUFFER_BYTES = 2 * (4096 + 1024)
DEAR = TransferCosts(message_us=1e6)
FRAGMENTED = NodeFacts(num_slots=512, costs=DEAR)
SMALL_PAGES = NodeFacts(num_slots=512, tokens_per_page=4)


class GatedDevice(HostDevice):
    """The CPU as a device that can be made to stand still in the middle of a pass."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stands = False

    @override
    def begin(self, work: Callable[[], None]) -> PassEnd:
        def gated() -> None:
            if not self.gate.is_set():
                self.stands = True
                self.gate.wait()
            work()

        return super().begin(gated)


class GatedMemory(DeviceMemory):
    """Pools whose passes can be held up."""

    def __init__(self, num_slots: int, groups: Mapping[int, tuple[int, ...]] = GROUPS) -> None:
        self.device = GatedDevice()
        super().__init__(self.device, num_slots, groups)


DEVICE = replace(FRAGMENTED, memory=GatedMemory)
SIDES = {
    "fragmented": (FRAGMENTED, FRAGMENTED),
    "passes in threads": (DEVICE, DEVICE),
    "smaller pages here": (SMALL_PAGES, NodeFacts(num_slots=512)),
    "smaller pages there": (NodeFacts(num_slots=512), SMALL_PAGES),
}


class Staged:
    """A context node and a generation node on a network of their own."""

    def __init__(self, *lanes: str) -> None:
        self.network = Network(piece_bytes=512, lanes=lanes)
        self.nodes: list[Node] = []

    async def start(self, facts: NodeFacts) -> Node:
        name = f"node{len(self.nodes)}"
        self.nodes.append(await start_node(name, self.network.transport(name), facts))
        return self.nodes[-1]

    async def close(self) -> None:
        for node in reversed(self.nodes):
            await node.agent.close()


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers of two blocks of the larger group, five of the other."""
    monkeypatch.setattr(staging_buffers, "STAGING_BUFFERS", 2)
    monkeypatch.setattr(staged_cut, "STAGING_MESSAGE_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(staged_cut, "DEVICE_MESSAGE_BYTES", BUFFER_BYTES)


@pytest.fixture
async def world() -> AsyncIterator[Staged]:
    made = Staged("self")
    yield made
    await made.close()


@pytest.fixture
async def ipc_world() -> AsyncIterator[Staged]:
    """Lanes over which a lost peer may still reach what was posted."""
    made = Staged("cuda_ipc")
    yield made
    await made.close()


@pytest.fixture(params=SIDES)
async def nodes(world: Staged, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Node, Node]]:
    context, generation = [await world.start(facts) for facts in SIDES[request.param]]
    yield context, generation
    for node in (generation, context):
        await node.agent.close()
        assert node.agent.counters.sessions_in_flight == 0
        assert node.agent.counters.leases_in_doubt == 0
        assert node.agent.counters.staging_bytes_in_doubt == 0


def scattered(seed: int, blocks: int, slots: int = 512) -> list[int]:
    """Slots of no order."""
    return [int(slot) for slot in np.random.default_rng(seed).permutation(slots)[:blocks]]


async def test_pages_and_counts_arrive(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    await Transfer("r", scattered(1, 25), scattered(2, 25), chunk_blocks=10).run(
        context, generation
    )
    for node in nodes:
        (end,) = node.engine.of(SessionEnded, "r")
        assert (end.transferred_bytes, end.transferred_blocks) == (25 * BLOCK_BYTES, 25)
        assert node.agent.counters.bytes_total == 25 * BLOCK_BYTES
        assert node.agent.counters.busy_bytes == 25 * BLOCK_BYTES
    chunks = generation.engine.of(ChunkReceived, "r")
    assert [chunk.end_block for chunk in chunks] == [10, 20, 25]


async def test_other_slots_stay_as_they_were(nodes: tuple[Node, Node]) -> None:
    context, generation = nodes
    slots = scattered(2, 9)
    for array in generation.memory.pools.values():
        array[:] = 99
    await Transfer("r", scattered(1, 9), slots).run(context, generation)
    rest = sorted(set(range(512)) - set(slots))
    assert all((array[rest] == 99).all() for array in generation.memory.pools.values())


async def test_sessions_that_want_more_buffers_than_there_are_all_finish(
    nodes: tuple[Node, Node],
) -> None:
    context, generation = nodes
    order, target = scattered(3, 400), scattered(4, 400)
    transfers = [
        Transfer(
            "r" * (number + 1),
            order[20 * number : 20 * number + 20],
            target[20 * number : 20 * number + 20],
            chunk_blocks=7,
        )
        for number in range(20)
    ]
    await asyncio.gather(*(one.run(context, generation) for one in transfers))


@pytest.mark.parametrize("stage", ["granted", "announced", "ready", "shipping", "early"])
@pytest.mark.parametrize("who", ["context", "generation", "both"])
async def test_cancel_at_every_stage_ends_both_sides(
    nodes: tuple[Node, Node], stage: str, who: str
) -> None:
    context, generation = nodes
    transfer = Transfer("r", scattered(1, 30), scattered(2, 30), chunk_blocks=6)
    await cancel_at(stage, who, transfer, context, generation)
    await transfer.ended(context, generation, Outcome.CANCELLED)
    await Transfer("next", scattered(5, 30), scattered(2, 30)).run(context, generation)


async def test_pages_of_a_cancelled_transfer_are_clean_for_the_next(
    nodes: tuple[Node, Node],
) -> None:
    """No byte of a cancelled transfer lands after its lease has ended."""
    context, generation = nodes
    slots = scattered(2, 64)
    for number in range(20):
        name = f"cancelled {number}"
        transfer = Transfer(name, scattered(number, 64), slots, chunk_blocks=16)
        fill(context.memory, transfer.source_slots, number)
        await granted(context, generation, name, 20_000)
        transfer.give_pages(generation)
        transfer.ship(context)
        for _ in range(3 * number):
            await asyncio.sleep(0)
        generation.agent.cancel(name, "not wanted")
        await generation.engine.expect(LeaseEnded, name)
        for array in generation.memory.pools.values():
            array[slots] = 255 - number
        await transfer.ended(context, generation, Outcome.CANCELLED)
        for array in generation.memory.pools.values():
            assert (array[slots] == 255 - number).all()


async def in_mid_transfer(world: Staged) -> tuple[Node, Node, Transfer]:
    """A request whose first chunk is in, with staged posts of the second one under way."""
    context, generation = await world.start(FRAGMENTED), await world.start(FRAGMENTED)
    transfer = Transfer("r", scattered(1, 40), scattered(2, 40), chunk_blocks=20)
    await to_mid_transfer(context, generation, transfer)
    return context, generation, transfer


def kill(world: Staged, node: Node) -> None:
    assert isinstance(node.transport, InProcessTransport)
    world.network.kill(node.transport)


async def home_again(node: Node, transfer: Transfer) -> None:
    """The receiver's pages are back, and nothing writes them any more."""
    end = await node.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    await node.engine.expect(LeaseEnded, "r")
    assert transfer.target is not None
    assert (transfer.target.releases, transfer.target.quarantines) == (1, 0)
    for array in node.memory.pools.values():
        array[transfer.target_slots] = 77
    for _ in range(200):
        await asyncio.sleep(0)
    for array in node.memory.pools.values():
        assert (array[transfer.target_slots] == 77).all()
    assert not node.engine.of(HandoffReceived, "r")


async def test_a_dead_sender_fails_the_request_and_frees_the_pages(world: Staged) -> None:
    context, generation, transfer = await in_mid_transfer(world)
    kill(world, context)
    await home_again(generation, transfer)
    assert generation.agent.counters.failures["peer_lost"] == 1
    assert generation.agent.counters.staging_bytes_in_doubt == 0


async def test_a_dead_receiver_fails_the_request_and_frees_the_pages(world: Staged) -> None:
    context, generation, transfer = await in_mid_transfer(world)
    kill(world, generation)
    end = await context.engine.expect(SessionEnded, "r")
    assert end.outcome is Outcome.FAILED
    await context.engine.expect(LeaseEnded, "r", len(transfer.sent))
    assert all(chunk.releases == 1 for chunk in transfer.sent)


async def test_where_a_peer_can_reach_buffers_they_are_in_doubt_and_pages_are_not(
    ipc_world: Staged,
) -> None:
    context, generation, transfer = await in_mid_transfer(ipc_world)
    kill(ipc_world, context)
    await home_again(generation, transfer)
    assert not generation.engine.of(LeaseInDoubt, "r")
    counters = generation.agent.counters
    assert counters.staging_bytes_in_doubt == 2 * BUFFER_BYTES
    generation.agent.peer_known_dead(context.info.incarnation)
    await asyncio.sleep(0)
    assert counters.staging_bytes_in_doubt == 0
    other = await ipc_world.start(FRAGMENTED)
    await Transfer("next", scattered(1, 40), scattered(2, 40)).run(other, generation)


async def test_pages_are_not_free_before_the_last_pass_over_them_is_over(
    ipc_world: Staged,
) -> None:
    """Nothing remote touches the pages of a dead sender's transfer; a pass of our own may."""
    context, generation = await ipc_world.start(DEVICE), await ipc_world.start(DEVICE)
    transfer = Transfer("r", scattered(1, 40), scattered(2, 40), chunk_blocks=20)
    fill(context.memory, transfer.source_slots, 1)
    await granted(context, generation, "r", 20_000)
    transfer.give_pages(generation)
    transfer.ship_chunk(context, 0)
    await generation.engine.expect(ChunkReceived, "r")
    assert isinstance(generation.memory, GatedMemory)
    device = generation.memory.device
    device.gate.clear()
    transfer.ship_chunk(context, 1)
    while not device.stands:  # noqa: ASYNC110 (a thread that stands raises no event)
        await asyncio.sleep(0)
    kill(ipc_world, context)
    generation.agent.peer_known_dead(context.info.incarnation)
    for _ in range(500):
        await asyncio.sleep(0)
    assert not generation.engine.of(LeaseEnded, "r")
    device.gate.set()
    await home_again(generation, transfer)
    assert generation.agent.counters.staging_bytes_in_doubt == 0


async def test_death_told_before_the_connection_breaks(ipc_world: Staged) -> None:
    context, generation, transfer = await in_mid_transfer(ipc_world)
    generation.agent.peer_known_dead(context.info.incarnation)
    await home_again(generation, transfer)
    assert generation.agent.counters.staging_bytes_in_doubt == 0


async def test_frozen_data_is_ended_by_the_deadline(world: Staged) -> None:
    facts = replace(FRAGMENTED, limits=TransferLimits(floor_ms=200, drain_ms=200))
    context, generation = await world.start(facts), await world.start(facts)
    transfer = Transfer("r", scattered(1, 40), scattered(2, 40))
    await granted(context, generation, "r", 20_000)
    assert isinstance(context.transport, InProcessTransport)
    context.transport.frozen = True
    transfer.give_pages(generation)
    transfer.ship(context)
    await home_again(generation, transfer)
    context.transport.frozen = False
    await Transfer("next", scattered(1, 20), scattered(2, 20)).run(context, generation)


async def test_memories_that_cannot_stage_move_runs_and_refuse_other_pages(world: Staged) -> None:
    device = replace(FRAGMENTED, memory=UnstagedMemory)
    context, generation = await world.start(device), await world.start(FRAGMENTED)
    await Transfer("r", scattered(1, 9), scattered(2, 9)).run(context, generation)
    assert not context.info.can_stage
    paged = await world.start(SMALL_PAGES)
    paged.agent.grant("refused", (context.address,), 10, 20_000)
    end = await paged.engine.expect(SessionEnded, "refused")
    assert end.outcome is Outcome.FAILED
    assert "target tokens_per_page: ours is 4, the peer's is 16" in end.reason
    assert "staging: ours is possible, the peer's is impossible with this memory" in end.reason
    for node in (paged, context):
        assert any("staging" in row for rows in node.agent.refusals.values() for row in rows)


async def test_the_receiver_may_hold_a_window_where_the_sender_holds_all(world: Staged) -> None:
    """Blocks that have passed the receiver's window are not wanted; the others are staged."""
    context, generation = await world.start(SMALL_PAGES), await world.start(FRAGMENTED)
    transfer = Transfer("r", scattered(1, 8), scattered(2, 8))
    fill(context.memory, transfer.source_slots, 3)
    await granted(context, generation, "r", 20_000)
    windowed = [-1] * 5 + transfer.target_slots[5:]
    generation.agent.ready("r", 0, 8, lease(0, transfer.target_slots, windowed))
    transfer.ship(context)
    context.agent.hand_off("r", HANDOFF)
    await generation.engine.expect(HandoffReceived, "r")
    end = await generation.engine.expect(SessionEnded, "r")
    assert end.transferred_bytes == 8 * (4096 + 1024) + 3 * 2048
    passed = generation.memory.pools[1, 0][transfer.target_slots[:5]]
    assert not passed.any()


ONE_GROUP = NodeFacts(num_slots=512, groups={0: (4096, 1024, 2048)}, views={0: 0})
"""What others hold in two layer groups lies in one here, whose window covers every sequence."""


@pytest.mark.parametrize("one_group", ["context", "generation"])
async def test_layer_groups_need_not_be_cut_alike(world: Staged, one_group: str) -> None:
    facts = [ONE_GROUP, FRAGMENTED] if one_group == "context" else [FRAGMENTED, ONE_GROUP]
    context, generation = [await world.start(entry) for entry in facts]
    transfer = Transfer("r", scattered(1, 30), scattered(2, 30), chunk_blocks=7)
    fill(context.memory, transfer.source_slots, 3)
    await granted(context, generation, "r", 20_000)
    transfer.give_pages(generation)
    transfer.ship(context)
    context.agent.hand_off("r", HANDOFF)
    await transfer.ended(context, generation, Outcome.SUCCEEDED)
    (end,) = generation.engine.of(SessionEnded, "r")
    assert end.transferred_bytes == 30 * BLOCK_BYTES
    # Layers in order: two of the first group, one of the second or third.
    for sent, got in zip(
        context.memory.pools.values(), generation.memory.pools.values(), strict=True
    ):
        assert sent[transfer.source_slots].any()
        assert np.array_equal(sent[transfer.source_slots], got[transfer.target_slots])
