"""Two instances of agents, one a rank, that move a request of any geometry, every byte checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.arithmetic import ceil_div
from tests.transfer.agent_rig import FAST, HANDOFF, TOKEN, Engine
from tests.transfer.filled_pools import PADDING, FilledPools, Pools
from tests.transfer.geometries import Geometry
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import (
    AnnounceReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.control import ControlTiming
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.identity import Incarnation, PeerAddress
from transfer.inprocess import InProcessTransport, Network
from transfer.lease import TransferLease
from transfer.outcome import Outcome
from transfer.page_staging import HostStaging, PageStaging
from transfer.passes import AtOnce
from transfer.plan import TransferPlan
from transfer.rank_info import PageGroup, RankInfo
from transfer.transport import PageMemory, Transport

REQUEST = "r"
Slots = npt.NDArray[np.int32]


class PoolMemory(PageMemory):
    """Pools of a rank, host memory that can stage."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._staging = HostStaging(pools, AtOnce())

    @property
    @override
    def staging(self) -> PageStaging | None:
        return self._staging

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        part = self._pools[pool_group][pool][first_slot : first_slot + num_slots]
        assert len(part) == num_slots
        return part.reshape(-1)


class RankLease(TransferLease):
    """Blocks ``[first_block, end_block)`` of a rank's request, read by layer group."""

    def __init__(
        self, pools: FilledPools, firsts: dict[int, int], first_block: int, end_block: int
    ) -> None:
        """Blocks before a layer group's ``firsts`` are not wanted."""
        self.first_block = first_block
        self.end_block = end_block
        self.releases = 0
        self.quarantines = 0
        self._pools = pools
        self._firsts = firsts

    @override
    def slots(self, view: int) -> Slots:
        group = self._pools.info.page_table.group(view)
        own = self._pools.slots[view]
        if group.kind == "state":
            return own
        table = np.full(self.end_block - self.first_block, -1, dtype=np.int32)
        for ordinal, slot in zip(self._pools.ordinals[view], own, strict=True):
            if max(self.first_block, self._firsts.get(view, 0)) <= ordinal < self.end_block:
                table[ordinal - self.first_block] = slot
        return table

    @override
    def release(self) -> None:
        self.releases += 1

    @override
    def quarantine(self) -> None:
        self.quarantines += 1


@dataclass
class RankNode:
    """One rank: agent, engine, pools with one request in them."""

    info: RankInfo
    pools: FilledPools
    agent: TransferAgent
    engine: Engine
    transport: Transport
    address: PeerAddress = field(init=False)
    leases: list[RankLease] = field(default_factory=list)
    firsts: dict[int, int] = field(default_factory=dict)
    killed: bool = False

    def kill(self) -> None:
        """What SIGKILL of the process shows to others; it gives nothing back itself."""
        assert isinstance(self.transport, InProcessTransport)
        self.killed = True
        self.transport.network.kill(self.transport)

    def lease(self, first_block: int, end_block: int) -> RankLease:
        """A new lease of the request's blocks."""
        lease = RankLease(self.pools, self.firsts, first_block, end_block)
        self.leases.append(lease)
        return lease

    def hand_off(self) -> None:
        """The leader has the first tokens."""
        if self.info.shape.leads:
            self.agent.hand_off(REQUEST, HANDOFF)
        else:
            self.agent.hand_off_pages(REQUEST)

    async def leases_over(self) -> None:
        """Wait until every lease has come back clean."""
        if self.leases:
            await self.engine.expect(LeaseEnded, REQUEST, len(self.leases))
        assert all((lease.releases, lease.quarantines) == (1, 0) for lease in self.leases)


@dataclass
class Instances:
    """The two dp groups that a request meets."""

    contexts: list[RankNode]
    generations: list[RankNode]
    prompt_tokens: int
    tokens_per_block: int

    @property
    def end_block(self) -> int:
        """Blocks of the prompt."""
        return ceil_div(self.prompt_tokens, self.tokens_per_block)

    @property
    def nodes(self) -> list[RankNode]:
        """All ranks."""
        return [*self.contexts, *self.generations]

    @property
    def sources(self) -> tuple[PeerAddress, ...]:
        """Where the context ranks are."""
        return tuple(node.address for node in self.contexts)

    def grant(self, nodes: Sequence[RankNode] | None = None, deadline_ms: int = 20_000) -> None:
        """These generation ranks grant, all unless told otherwise."""
        for node in self.generations if nodes is None else nodes:
            node.agent.grant(REQUEST, self.sources, self.prompt_tokens, deadline_ms)

    def receiving(self) -> list[RankNode]:
        """Generation ranks that have a session."""
        return [node for node in self.generations if self._has_session(node)]

    def _has_session(self, node: RankNode) -> bool:
        return node.info.shape.leads or any(
            TransferPlan.between(context.info, node.info).groups for context in self.contexts
        )

    async def announced(self) -> None:
        """Up to the announcement on all ranks."""
        self.grant()
        for context in self.contexts:
            await context.engine.expect(GrantReceived, REQUEST)
        for context in self.contexts:
            context.agent.announce(REQUEST)
        for node in self.receiving():
            await node.engine.expect(AnnounceReceived, REQUEST)

    def ready(self, random: Random) -> None:
        """All generation ranks give pages, each layer group from some block on."""
        for node in self.receiving():
            first = random.choice([0, 0, random.randint(0, self.end_block)])
            node.firsts = {
                group.layer_group: _first_wanted(group, random, first, self.end_block)
                for group in node.info.page_table.groups
            }
            node.agent.ready(REQUEST, first, self.end_block, node.lease(first, self.end_block))

    def ship(self, middle: int) -> None:
        """All context ranks send everything, in two chunks."""
        for node in self.contexts:
            for start, end in ((0, middle), (middle, self.end_block)):
                node.agent.ship(REQUEST, start, end, node.lease(start, end))

    def hand_off(self) -> None:
        """All context ranks are through."""
        for node in self.contexts:
            node.hand_off()

    async def run(self, random: Random) -> None:
        """The request from grant to end, every byte checked."""
        await self.announced()
        if random.random() < 0.5:
            self.ready(random)
            self.ship(random.randint(0, self.end_block))
        else:
            self.ship(random.randint(0, self.end_block))
            self.ready(random)
        self.hand_off()
        await self.ended(Outcome.SUCCEEDED)
        for node in self.generations:
            handoffs = node.engine.of(HandoffReceived, REQUEST)
            assert len(handoffs) == (node in self.receiving())
            assert not node.info.shape.leads or handoffs[0].data == HANDOFF
            self.check_bytes(node)
        moved = [
            sum(e.transferred_bytes for n in side for e in n.engine.of(SessionEnded, REQUEST))
            for side in (self.contexts, self.generations)
        ]
        assert moved[0] == moved[1]

    async def ended(self, outcome: Outcome) -> None:
        """Every rank's one outcome, and all leases home."""
        for node in self.nodes:
            end = await node.engine.expect(SessionEnded, REQUEST)
            assert end.outcome is outcome, end
        for node in self.nodes:
            await node.leases_over()
            assert len(node.engine.of(SessionEnded, REQUEST)) == 1
            assert len(node.engine.of(LeaseEnded, REQUEST)) == len(node.leases)

    def check_bytes(self, node: RankNode) -> None:
        """Wanted blocks hold what they should, all others what they held."""
        alone: set[int] = set()
        for context in self.contexts:
            alone |= set(TransferPlan.between(context.info, node.info).receiver_only_drafts)
        (given,) = node.leases or [RankLease(node.pools, {}, self.end_block, self.end_block)]
        untouched = node.pools.like(1)
        for held in node.pools.buffers():
            states = held.group.kind == "state"
            places = [self.end_block - 1] if states else held.ordinals
            first = max(given.first_block, node.firsts.get(held.group.layer_group, 0))
            due = np.array(places, dtype=int) >= first
            if held.buffer.layer_id in alone:
                due[:] = False
            expected = np.where(due[:, None, None], held.values(), np.uint8(PADDING))
            assert np.array_equal(held.data(node.pools.pools)[held.slots], expected)
            for pool in untouched[held.group.pool_group]:
                pool[held.slots] = 0
        for pool_group, pools in untouched.items():
            for marks, pool in zip(pools, node.pools.pools[pool_group], strict=True):
                assert (pool[marks == 1] == PADDING).all()


def _first_wanted(group: PageGroup, random: Random, first: int, end: int) -> int:
    # A lease has a request's state whole, or not at all.
    if group.kind == "state":
        return first
    return random.choice([first, random.randint(first, end)])


@dataclass(frozen=True)
class Cluster:
    """What all agents have in common."""

    timing: ControlTiming = FAST
    costs: TransferCosts = field(default_factory=TransferCosts)
    limits: TransferLimits = field(default_factory=TransferLimits)
    transport: Callable[[str], Transport] = field(
        default_factory=lambda: Network(piece_bytes=512).transport
    )
    """By the name of the rank."""


def numbered(pair: Geometry, incarnation: Incarnation) -> list[list[RankInfo]]:
    """All ranks of an instance, by dp group, numbered through. Its name begins with ``context`` or
    ``generation``.
    """
    side, ranks_of = (
        (pair.sender, pair.senders)
        if incarnation.instance.startswith("context")
        else (pair.receiver, pair.receivers)
    )
    groups = [ranks_of(dp_rank) for dp_rank in range(side.dp)]
    return [
        [
            info.model_copy(
                update={"incarnation": incarnation, "rank": number * len(group) + place}
            )
            for place, info in enumerate(group)
        ]
        for number, group in enumerate(groups)
    ]


@asynccontextmanager
async def instances(
    pair: Geometry, random: Random, prompt_tokens: int, cluster: Cluster | None = None
) -> AsyncIterator[Instances]:
    """Agents of the last dp group a side; the pools of the context ranks are filled."""
    cluster = cluster or Cluster()
    sides: dict[str, list[RankNode]] = {}
    for name in ("context", "generation"):
        groups = numbered(pair, Incarnation.mint(name))
        instance = [info for group in groups for info in group]
        sides[name] = [
            rank_node(info, instance, FilledPools(info, prompt_tokens, random), cluster, Engine())
            for info in groups[-1]
        ]
    both = Instances(sides["context"], sides["generation"], prompt_tokens, pair.tokens_per_block)
    for node in both.contexts:
        node.pools.fill()
    for node in both.nodes:
        node.address = await node.agent.start()
    try:
        yield both
    finally:
        await asyncio.gather(*(node.agent.close() for node in reversed(both.nodes)))
    for node in both.nodes:
        assert node.killed or node.agent.counters.sessions_in_flight == 0


def rank_node(
    info: RankInfo,
    instance: list[RankInfo],
    pools: FilledPools,
    cluster: Cluster,
    engine: Engine,
) -> RankNode:
    """An agent that is not started."""
    transport = cluster.transport(str(info.rank_id))
    agent = TransferAgent(
        rank_info=info,
        instance=instance,
        views={group.layer_group: group.layer_group for group in info.page_table.groups},
        transport=transport,
        memory=PoolMemory(pools.pools),
        config=AgentConfig(
            host="127.0.0.1",
            cluster_token=TOKEN,
            timing=cluster.timing,
            limits=cluster.limits,
            costs=cluster.costs,
        ),
        deliver=engine,
    )
    return RankNode(info, pools, agent, engine, transport)
