"""Two agents and the least engine around them, for tests of transfers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.control import ControlTiming
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease
from transfer.messages import ChoiceHandoff, HandoffData
from transfer.outcome import Outcome
from transfer.page_staging import HostStaging, PageStaging
from transfer.passes import AtOnce
from transfer.rank_info import (
    EngineFacts,
    PageBuffer,
    PageGroup,
    PageTable,
    PageView,
    ParallelShape,
    RankInfo,
)
from transfer.transport import PageMemory, Transport

TOKEN = "the token of the cluster"
WAIT_S = 30.0
GROUPS = {0: (4096, 1024), 1: (2048,)}
"""Slot bytes by layer group; group 1 keeps a window."""
VIEWS = {0: 0, 1: 2}
RUNS_ONLY = TransferCosts(message_us=0)
"""Where messages cost nothing, only what cannot move whole is staged."""
HEADS = 2
TOKENS_PER_BLOCK = 16
EventT = TypeVar("EventT", bound=AgentEvent)
HANDOFF = HandoffData(choices=(ChoiceHandoff(token=7),), cached_tokens=0)
PATIENT = ControlTiming(connect_ms=10_000, heartbeat_ms=200, silence_ms=2_000)
"""For processes that share few cores with others."""
FAST = ControlTiming(connect_ms=3_000, heartbeat_ms=100, silence_ms=600)


def page_view(group: int, pool: int, slot_bytes: int, pages: tuple[int, int]) -> PageView:
    """``pages`` of a block, and tokens in each."""
    pages_per_block, tokens_per_page = pages
    return PageView(
        owner="target",
        layer_group=group,
        pool=pool,
        mapping="head_major",
        element="uint8",
        num_heads=HEADS,
        first_head=0,
        total_heads=HEADS,
        elements_per_head=slot_bytes // (HEADS * pages_per_block * tokens_per_page),
        tokens_per_page=tokens_per_page,
        pages_per_block=pages_per_block,
        page_bytes=slot_bytes // pages_per_block,
        page_stride_bytes=slot_bytes // pages_per_block,
        buffers=(
            PageBuffer(
                layer_id=2 * group + pool, role="KEY", offset_bytes=0, size_bytes=slot_bytes
            ),
        ),
    )


def rank_info(
    instance: str,
    *,
    tokens_per_block: int = 16,
    tokens_per_page: int | None = None,
    groups: Mapping[int, tuple[int, ...]] = GROUPS,
) -> RankInfo:
    page_tokens = tokens_per_page or tokens_per_block
    return RankInfo(
        incarnation=Incarnation.mint(instance),
        rank=0,
        shape=ParallelShape(),
        layers_per_stage=(4,),
        tokens_per_block=tokens_per_block,
        engine=EngineFacts(
            model="m", model_hash="h", rope=(), kv_dtype="uint8", attention="grouped"
        ),
        page_table=PageTable(
            groups=tuple(
                PageGroup(
                    layer_group=group,
                    kind="attention",
                    window=64 if group else None,
                    sink_blocks=0,
                    pool_group=group,
                    slot_bytes=slot_bytes,
                )
                for group, slot_bytes in groups.items()
            ),
            views=tuple(
                page_view(group, pool, size, (tokens_per_block // page_tokens, page_tokens))
                for group, slot_bytes in groups.items()
                for pool, size in enumerate(slot_bytes)
            ),
        ),
        data_host="",
        data_port=0,
    )


class ArrayMemory(PageMemory):
    """Pools as numpy arrays ``[num_slots, slot_bytes]``."""

    def __init__(self, num_slots: int, groups: Mapping[int, tuple[int, ...]] = GROUPS) -> None:
        self.pools = {
            (group, pool): np.zeros((num_slots, size), np.uint8)
            for group, slot_bytes in groups.items()
            for pool, size in enumerate(slot_bytes)
        }
        self._staging = HostStaging(
            {
                group: [self.pools[group, pool] for pool in range(len(slot_bytes))]
                for group, slot_bytes in groups.items()
            },
            AtOnce(),
        )

    @property
    @override
    def staging(self) -> PageStaging | None:
        return self._staging

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        part = self.pools[pool_group, pool][first_slot : first_slot + num_slots]
        assert len(part) == num_slots
        return part.reshape(-1)


class UnstagedMemory(ArrayMemory):
    """Pools that nothing can gather."""

    @property
    @override
    def staging(self) -> PageStaging | None:
        return None


class Lease(TransferLease):
    """Counts what happens to it."""

    def __init__(self, first_block: int, tables: Mapping[int, npt.NDArray[np.int32]]) -> None:
        self.first_block = first_block
        self.end_block = first_block + len(tables[0])
        self.releases = 0
        self.quarantines = 0
        self._tables = tables

    @override
    def slots(self, view: int) -> npt.NDArray[np.int32]:
        return self._tables[view]

    @override
    def release(self) -> None:
        self.releases += 1

    @override
    def quarantine(self) -> None:
        self.quarantines += 1


def lease(first_block: int, slots: list[int], windowed: list[int] | None = None) -> Lease:
    """Block ``first_block + i`` lies in slot ``slots[i]``, in group 1 in ``windowed[i]``."""
    return Lease(
        first_block,
        {
            0: np.asarray(slots, np.int32),
            2: np.asarray(slots if windowed is None else windowed, np.int32),
        },
    )


class Engine:
    """Keeps events and releases leases as told."""

    def __init__(self) -> None:
        self.events: list[AgentEvent] = []
        self._came = asyncio.Event()

    def __call__(self, event: AgentEvent) -> None:
        self.events.append(event)
        if isinstance(event, LeaseEnded):
            event.lease.release()
        elif isinstance(event, LeaseInDoubt):
            event.lease.quarantine()
        self._came.set()

    def of(self, kind: type[EventT], request_id: str) -> list[EventT]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and event.request_id == request_id
        ]

    async def expect(self, kind: type[EventT], request_id: str, count: int = 1) -> EventT:
        """Wait for the ``count``-th event of this kind."""
        async with asyncio.timeout(WAIT_S):
            while len(self.of(kind, request_id)) < count:
                self._came.clear()
                await self._came.wait()
        return self.of(kind, request_id)[count - 1]


@dataclass
class Node:
    """One agent with its engine, memory and transport."""

    agent: TransferAgent
    engine: Engine
    memory: ArrayMemory
    transport: Transport
    info: RankInfo
    address: PeerAddress = field(init=False)

    async def start(self) -> None:
        self.address = await self.agent.start()


@dataclass
class NodeFacts:
    """What distinguishes nodes; the rest is the same for all."""

    token: str = TOKEN
    tokens_per_block: int = 16
    num_slots: int = 64
    control_port: int = 0
    timing: ControlTiming = FAST
    limits: TransferLimits = field(default_factory=TransferLimits)
    costs: TransferCosts = field(default_factory=lambda: RUNS_ONLY)
    tokens_per_page: int | None = None
    memory: type[ArrayMemory] = ArrayMemory
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: GROUPS)
    views: Mapping[int, int] = field(default_factory=lambda: VIEWS)


async def start_node(name: str, transport: Transport, facts: NodeFacts | None = None) -> Node:
    facts = facts or NodeFacts()
    info = rank_info(
        name,
        tokens_per_block=facts.tokens_per_block,
        tokens_per_page=facts.tokens_per_page,
        groups=facts.groups,
    )
    memory = facts.memory(facts.num_slots, facts.groups)
    engine = Engine()
    agent = TransferAgent(
        rank_info=info,
        instance=(info,),
        views=facts.views,
        transport=transport,
        memory=memory,
        config=AgentConfig(
            host="127.0.0.1",
            cluster_token=facts.token,
            control_port=facts.control_port,
            timing=facts.timing,
            limits=facts.limits,
            costs=facts.costs,
        ),
        deliver=engine,
    )
    node = Node(agent, engine, memory, transport, info)
    await node.start()
    return node


def fill(memory: ArrayMemory, slots: list[int], stamp: int) -> None:
    """Write a pattern that tells request, pool and block apart."""
    for (group, pool), array in memory.pools.items():
        for place, slot in enumerate(slots):
            array[slot] = np.random.default_rng((stamp, group, pool, place)).integers(
                0, 256, array.shape[1], dtype=np.uint8
            )


def same_blocks(source: Node, source_slots: list[int], target: Node, slots: list[int]) -> bool:
    """Whether blocks arrived, in every pool. Presence of data is the caller's business."""
    return all(
        np.array_equal(token_rows(source, key, source_slots), token_rows(target, key, slots))
        for key in target.memory.pools
    )


def token_rows(node: Node, key: tuple[int, int], slots: list[int]) -> npt.NDArray[np.uint8]:
    """Blocks of a pool as ``[slots, heads, tokens, elements]``, whatever their pages are."""
    group, pool = key
    view = next(
        view
        for view in node.info.page_table.views
        if (view.layer_group, view.pool) == (group, pool)
    )
    pages = node.memory.pools[key][slots].reshape(
        len(slots), view.pages_per_block, HEADS, view.tokens_per_page, view.elements_per_head
    )
    return pages.transpose(0, 2, 1, 3, 4).reshape(len(slots), HEADS, -1, view.elements_per_head)


async def granted(context: Node, generation: Node, request_id: str, deadline_ms: int) -> None:
    """Up to the announcement."""
    generation.agent.grant(request_id, (context.address,), 100, deadline_ms)
    await context.engine.expect(GrantReceived, request_id)
    context.agent.announce(request_id)
    await generation.engine.expect(AnnounceReceived, request_id)


@dataclass
class Transfer:
    """One request's pages on both sides."""

    request_id: str
    source_slots: list[int]
    target_slots: list[int]
    chunk_blocks: int = 2
    deadline_ms: int = 20_000
    sent: list[Lease] = field(default_factory=list)
    target: Lease | None = None

    async def run(self, context: Node, generation: Node) -> None:
        """From grant to handoff, and both ends' leases over."""
        fill(context.memory, self.source_slots, len(self.request_id))
        await granted(context, generation, self.request_id, self.deadline_ms)
        self.give_pages(generation)
        self.ship(context)
        context.agent.hand_off(self.request_id, HANDOFF)
        handoff = await generation.engine.expect(HandoffReceived, self.request_id)
        assert handoff.data == HANDOFF
        await self.ended(context, generation, Outcome.SUCCEEDED)
        assert same_blocks(context, self.source_slots, generation, self.target_slots)

    def give_pages(self, generation: Node) -> None:
        self.target = lease(0, self.target_slots)
        generation.agent.ready(self.request_id, 0, len(self.target_slots), self.target)

    def ship(self, context: Node) -> None:
        for chunk in range(-(-len(self.source_slots) // self.chunk_blocks)):
            self.ship_chunk(context, chunk)

    def ship_chunk(self, context: Node, number: int) -> None:
        start = number * self.chunk_blocks
        part = self.source_slots[start : start + self.chunk_blocks]
        chunk = lease(start, part)
        self.sent.append(chunk)
        context.agent.ship(self.request_id, start, start + len(part), chunk)

    async def ended(self, context: Node, generation: Node, outcome: Outcome) -> None:
        """Both outcomes and all leases given so far."""
        for node in (context, generation):
            end = await node.engine.expect(SessionEnded, self.request_id)
            assert end.outcome is outcome, end.reason
        if self.sent:
            await context.engine.expect(LeaseEnded, self.request_id, len(self.sent))
        if self.target is not None:
            await generation.engine.expect(LeaseEnded, self.request_id)
            assert (self.target.releases, self.target.quarantines) == (1, 0)
        assert all(chunk.releases == 1 for chunk in self.sent)


class Wire:
    """A TCP proxy before a node's control port: it can be cut, and stopped as SIGSTOP would."""

    def __init__(self, target: PeerAddress) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.connections = 0

    async def start(self, port: int = 0) -> PeerAddress:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        port = self._server.sockets[0].getsockname()[1]
        return self._target.model_copy(update={"control_port": port})

    def stop_flow(self) -> None:
        self._flows.clear()

    def resume_flow(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(
            self._target.host, self._target.control_port
        )
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._flows.wait()
                sink.write(data)
        sink.close()
