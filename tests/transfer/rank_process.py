"""One rank of an instance, in a process of its own over UCX; many requests go through it at once.

It prints its address, ``ended REQUEST OUTCOME`` for every request and ``halted REQUEST`` where it
stands still. It answers ``state`` with :class:`RankState` and ``failure`` with what it says of its
transfers, does ``cancel REQUEST``, ``break`` its thread of transfers, and as a generation rank
``grant ORDER``. It ends with its standard input.

A request's name tells who does what wrong with it: ``4-context-1-quits`` is request 4, and rank 1
of the context instance quits it half way; all goes well with ``4``. The request of a number has
blocks ``[number * BLOCKS, (number + 1) * BLOCKS)`` of the values that all context ranks hold.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from tests.transfer.agent_rig import HANDOFF, PATIENT, Engine
from tests.transfer.context_process import RankState, orders
from tests.transfer.filled_pools import PADDING, FilledPools
from tests.transfer.geometries import Attention, Geometry, Side, same_model
from tests.transfer.instance_rig import Cluster, numbered, rank_node
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease
from transfer.outcome import Outcome
from transfer.ucx.transport import UcxTransport

REQUESTS = 36
"""Numbers there are pages for."""
BLOCKS = 16
CHUNK_BLOCKS = 4
TOKENS_PER_BLOCK = 16
PAUSE_S = 0.005
DEADLINE_MS = 20_000


class RankFacts(BaseModel):
    """Which rank it is; ``tp`` are the tensor parallel sizes of sender and receiver."""

    model_config = ConfigDict(frozen=True)

    tp: tuple[int, int]
    incarnation: Incarnation
    rank: int

    def geometry(self) -> Geometry:
        """Both instances; a chunk is 64 KiB over all ranks."""
        layers = (Attention(4, head_dim=32), Attention(4, head_dim=32))
        sender, receiver = (Side(tp=size, stages=(2,)) for size in self.tp)
        return same_model(sender, receiver, layers, tokens_per_block=TOKENS_PER_BLOCK)


class Order(BaseModel):
    """Grant these requests to these ranks."""

    model_config = ConfigDict(frozen=True)

    names: tuple[str, ...]
    sources: tuple[PeerAddress, ...]


class Story(NamedTuple):
    """What a request's name tells."""

    number: int
    rank: str
    deed: str

    @classmethod
    def of(cls, name: str) -> Self:
        number, _, rest = name.partition("-")
        rank, _, deed = rest.rpartition("-")
        return cls(int(number), rank, deed)


@dataclass(frozen=True)
class RequestLease(TransferLease):
    """Blocks of a request, which begin at block ``base`` of the rank's pools."""

    pools: FilledPools
    base: int
    first_block: int
    end_block: int

    @override
    def slots(self, view: int) -> npt.NDArray[np.int32]:
        return self.pools.slots[view][self.base + self.first_block : self.base + self.end_block]

    @override
    def release(self) -> None:
        pass

    @override
    def quarantine(self) -> None:
        pass


class ServingRank(Engine):
    """The rank's engine: every request is served by a task of its own."""

    def __init__(self, facts: RankFacts) -> None:
        super().__init__()
        self._me = f"{facts.incarnation.instance}-{facts.rank}"
        self._receives = facts.incarnation.instance.startswith("generation")
        (instance,) = numbered(facts.geometry(), facts.incarnation)
        info = instance[facts.rank]
        self._leads = info.shape.leads
        tokens = REQUESTS * BLOCKS * TOKENS_PER_BLOCK
        self._pools = FilledPools(info, tokens, Random(facts.rank))
        if not self._receives:
            self._pools.fill()
        self._transport = UcxTransport("127.0.0.1")
        cluster = Cluster(timing=PATIENT, transport=lambda _name: self._transport)
        self._node = rank_node(info, instance, self._pools, cluster, self)
        self.agent = self._node.agent
        self._tasks: set[asyncio.Task[None]] = set()
        self._leases_out = 0
        self._wrong_pages = 0

    @property
    def state(self) -> RankState:
        return RankState.of(self.agent, self._leases_out, self._wrong_pages)

    @override
    def __call__(self, event: AgentEvent) -> None:
        super().__call__(event)
        if isinstance(event, GrantReceived):
            self._begin(self._send(event.request_id))
        elif isinstance(event, LeaseEnded):
            self._leases_out -= 1
        elif isinstance(event, SessionEnded):
            if event.outcome is Outcome.SUCCEEDED and self._receives:
                self._wrong_pages += self._wrong(Story.of(event.request_id).number)
            print(f"ended {event.request_id} {event.outcome.value} {event.reason}", flush=True)

    def grant(self, order: Order) -> None:
        """All that is named, at once."""
        for name in order.names:
            tokens = BLOCKS * TOKENS_PER_BLOCK
            self.agent.grant(name, order.sources, tokens, DEADLINE_MS)
            self._begin(self._receive(name))

    def break_thread(self) -> None:
        """Have the thread that drives UCX die of an error."""
        self._transport._driver.submit(_break)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _deed(self, name: str) -> str:
        """What this rank does wrong with a request; empty for nothing."""
        story = Story.of(name)
        return story.deed if story.rank == self._me else ""

    def _lease(self, name: str, first_block: int, end_block: int) -> RequestLease:
        self._leases_out += 1
        return RequestLease(self._pools, Story.of(name).number * BLOCKS, first_block, end_block)

    async def _send(self, name: str) -> None:
        deed = self._deed(name)
        if deed == "refuses":
            self.agent.cancel(name, "the prompt is too long")
            return
        self.agent.announce(name)
        if deed == "strays":
            # Blocks are shipped in order, from the first one on.
            self.agent.ship(name, 4, 8, self._lease(name, 4, 8))
            return
        for start in range(0, BLOCKS, CHUNK_BLOCKS):
            if start == BLOCKS // 2 and deed:
                self._stop(name, deed)
                return
            end = start + CHUNK_BLOCKS
            self.agent.ship(name, start, end, self._lease(name, start, end))
            await asyncio.sleep(PAUSE_S)
        if self._leads:
            self.agent.hand_off(name, HANDOFF)
        else:
            self.agent.hand_off_pages(name)

    async def _receive(self, name: str) -> None:
        deed = self._deed(name)
        await self.expect(AnnounceReceived, name)
        if deed == "refuses":
            self.agent.cancel(name, "no room")
            return
        self.agent.ready(name, 0, BLOCKS, self._lease(name, 0, BLOCKS))
        if deed:
            await self.expect(ChunkReceived, name)
            self._stop(name, deed)

    def _stop(self, name: str, deed: str) -> None:
        if deed == "quits":
            self.agent.cancel(name, "gone")
        else:
            print(f"halted {name}", flush=True)

    def _wrong(self, number: int) -> int:
        """Pages of a request that are not the context ranks', of buffers and blocks."""
        count = 0
        part = slice(number * BLOCKS, (number + 1) * BLOCKS)
        for whole in self._pools.buffers():
            held = replace(whole, slots=whole.slots[part], ordinals=whole.ordinals[part])
            found, values = held.data(self._pools.pools)[held.slots], held.values()
            assert (values != PADDING).any()
            count += int((found != values).any(axis=(1, 2)).sum())
        return count


def _break() -> None:
    raise SystemError("broken by a test")


async def serve(facts: RankFacts) -> None:
    """The process's life."""
    rank = ServingRank(facts)
    address = await rank.agent.start()
    print(address.model_dump_json(), flush=True)
    async for line in orders():
        verb, _, rest = line.partition(" ")
        if verb == "state":
            print(json.dumps(asdict(rank.state)), flush=True)
        elif verb == "failure":
            print(f"failure {rank.agent.failure}", flush=True)
        elif verb == "break":
            rank.break_thread()
        elif verb == "cancel":
            rank.agent.cancel(rest, "not wanted")
        else:
            assert verb == "grant", line
            rank.grant(Order.model_validate_json(rest))
    await rank.agent.close()


def main(facts: str) -> None:
    """``facts`` is :class:`RankFacts` as JSON."""
    asyncio.run(serve(RankFacts.model_validate_json(facts)))
