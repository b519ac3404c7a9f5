"""A context rank that serves every grant, in a process of its own or within a test.

The process prints its address as JSON, then the end of every session, and answers ``state`` with
:class:`RankState`; it ends with its standard input. Block ``i`` comes from slot ``i * stride``,
whose bytes are :func:`token_values`. A request gets as many blocks as there are slots, in chunks;
one whose id ends in ``#k`` gets blocks ``k, k + 1, ...`` instead, round the end, so that requests
can be told apart by every byte. One whose id begins with :data:`UNFINISHED` gets no last chunk and
no hand-over, so that it is under way whenever a signal arrives.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import uvloop

from tests.transfer.agent_rig import (
    HANDOFF,
    HEADS,
    PATIENT,
    TOKEN,
    TOKENS_PER_BLOCK,
    VIEWS,
    ArrayMemory,
    lease,
    rank_info,
)
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import AgentEvent, GrantReceived, LeaseEnded, SessionEnded
from transfer.control import ControlTiming
from transfer.costs import TransferCosts
from transfer.ucx.transport import UcxTransport

UNFINISHED = "unfinished "


@dataclass(frozen=True)
class ContextFacts:
    """How the process is set up."""

    slot_bytes: tuple[int, ...]
    num_slots: int
    stride: int = 1
    """Odd, where the number of slots is a power of two."""
    tokens_per_page: int = TOKENS_PER_BLOCK
    message_us: float = TransferCosts().message_us
    chunk_blocks: int = 4
    on_gpu: bool = False
    control_port: int = 0
    heartbeat_ms: int = PATIENT.heartbeat_ms
    silence_ms: int = PATIENT.silence_ms

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "slot_bytes": tuple(fields["slot_bytes"])})

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def timing(self) -> ControlTiming:
        """Of the control connections."""
        return ControlTiming(PATIENT.connect_ms, self.heartbeat_ms, self.silence_ms)

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """Slot bytes by layer group."""
        return {0: self.slot_bytes, 1: (2048,)}

    def slots(self) -> list[int]:
        """The slot of each block."""
        return [block * self.stride % self.num_slots for block in range(self.num_slots)]


def token_values(block: int) -> npt.NDArray[np.uint8]:
    """What is in every byte of a token of a block, ``[heads, tokens]``; few are 0."""
    rows = np.arange(HEADS * TOKENS_PER_BLOCK).reshape(HEADS, TOKENS_PER_BLOCK)
    return (rows * 7 + block * 13 + 1).astype(np.uint8)


def fill_tokens(memory: ArrayMemory, facts: ContextFacts) -> None:
    """Write the values of every block, in pages of ``tokens_per_page``."""
    for array in memory.pools.values():
        for block, slot in enumerate(facts.slots()):
            values = token_values(block)
            pages = values.reshape(HEADS, -1, facts.tokens_per_page).transpose(1, 0, 2)
            array[slot] = np.repeat(pages.reshape(-1), array.shape[1] // values.size)


def _memory(facts: ContextFacts) -> ArrayMemory:
    if not facts.on_gpu:
        memory = ArrayMemory(facts.num_slots, facts.groups)
        fill_tokens(memory, facts)
        return memory
    # torch takes seconds to load.
    from tests.transfer.device_memory import CudaMemory

    on_gpu = CudaMemory(facts.num_slots, facts.groups)
    fill_tokens(on_gpu, facts)
    on_gpu.upload()
    return on_gpu


def first_content(request_id: str) -> int:
    """The block that is a request's first."""
    _, _, shift = request_id.partition("#")
    return int(shift or 0)


@dataclass(frozen=True)
class RankState:
    """What a rank says of itself."""

    sessions_in_flight: int
    leases_out: int
    leases_in_doubt: int
    staging_bytes_in_doubt: int
    wrong_pages: int = 0

    @classmethod
    def of(cls, agent: TransferAgent, leases_out: int, wrong_pages: int = 0) -> Self:
        counters = agent.counters
        return cls(
            counters.sessions_in_flight,
            leases_out,
            counters.leases_in_doubt,
            counters.staging_bytes_in_doubt,
            wrong_pages,
        )


AT_HOME = RankState(0, 0, 0, 0)
"""Nothing runs, every page is home."""


class ContextRank:
    """Ships as soon as it is granted."""

    def __init__(self, facts: ContextFacts, say: Callable[[str], None]) -> None:
        """``say`` is told the end of every session, one line each."""
        self._facts = facts
        self._say = say
        self.leases_out = 0
        self.memory = _memory(facts)
        info = rank_info("context", groups=facts.groups, tokens_per_page=facts.tokens_per_page)
        self.agent = TransferAgent(
            rank_info=info,
            instance=(info,),
            views=VIEWS,
            transport=UcxTransport("127.0.0.1", cuda_device=0 if facts.on_gpu else None),
            memory=self.memory,
            config=AgentConfig(
                host="127.0.0.1",
                cluster_token=TOKEN,
                control_port=facts.control_port,
                timing=facts.timing,
                costs=TransferCosts(message_us=facts.message_us),
            ),
            deliver=self.handle,
        )

    @property
    def state(self) -> RankState:
        return RankState.of(self.agent, self.leases_out)

    def handle(self, event: AgentEvent) -> None:
        match event:
            case GrantReceived():
                self.serve(event.request_id)
            case LeaseEnded():
                self.leases_out -= 1
                event.lease.release()
            case SessionEnded():
                self._say(f"ended {event.request_id} {event.outcome.value} {event.reason}")
            case _:
                pass

    def serve(self, request_id: str) -> None:
        """What a grant leads to."""
        self.agent.announce(request_id)
        self.ship(request_id)

    def ship(self, request_id: str) -> None:
        """All of it, or all but the last chunk of an unfinished one."""
        starts = range(0, self._facts.num_slots, self._facts.chunk_blocks)
        if request_id.startswith(UNFINISHED):
            starts = starts[:-1]
            assert starts, "expected two chunks at least, so that one is shipped"
        for start in starts:
            self.ship_chunk(request_id, start)
        if not request_id.startswith(UNFINISHED):
            self.agent.hand_off(request_id, HANDOFF)

    def ship_chunk(self, request_id: str, start: int) -> None:
        """The chunk that starts at this block."""
        first = first_content(request_id)
        slots = self._facts.slots()
        part = (slots[first:] + slots[:first])[start : start + self._facts.chunk_blocks]
        self.leases_out += 1
        self.agent.ship(request_id, start, start + len(part), lease(start, part))


async def serve_until_told(facts: ContextFacts) -> None:
    """The process's life."""
    rank = ContextRank(facts, print)
    address = await rank.agent.start()
    print(address.model_dump_json())
    async for _ in orders():
        print(json.dumps(asdict(rank.state)))
    await rank.agent.close()
    print("bye")


async def orders() -> AsyncIterator[str]:
    """Lines of standard input, to its end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def main(facts: str) -> None:
    """``facts`` is :class:`ContextFacts` as JSON. The loop is that of a real worker; the tests'
    side runs asyncio's own.
    """
    uvloop.run(serve_until_told(ContextFacts.read(facts)))
