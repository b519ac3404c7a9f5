"""A context rank in a process of its own: ``python -m tests.transfer.context_process FACTS``.

``FACTS`` is JSON: :class:`ContextFacts`. Prints its address as JSON, then serves every grant: block
``i`` comes from slot ``i * stride``, whose bytes are :func:`token_values`. There are as many blocks
as slots, in chunks. Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
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
from transfer.costs import TransferCosts
from transfer.ucx.transport import UcxTransport


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

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "slot_bytes": tuple(fields["slot_bytes"])})

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


class ContextProcess:
    """Ships as soon as it is granted."""

    def __init__(self, facts: ContextFacts) -> None:
        self._facts = facts
        memory = _memory(facts)
        info = rank_info("context", groups=facts.groups, tokens_per_page=facts.tokens_per_page)
        self.agent = TransferAgent(
            rank_info=info,
            instance=(info,),
            views=VIEWS,
            transport=UcxTransport("127.0.0.1", cuda_device=0 if facts.on_gpu else None),
            memory=memory,
            config=AgentConfig(
                host="127.0.0.1",
                cluster_token=TOKEN,
                timing=PATIENT,
                costs=TransferCosts(message_us=facts.message_us),
            ),
            deliver=self.handle,
        )

    def handle(self, event: AgentEvent) -> None:
        match event:
            case GrantReceived():
                self.serve(event.request_id)
            case LeaseEnded():
                event.lease.release()
            case SessionEnded():
                print(f"{event.request_id} {event.outcome.value} {event.reason}", flush=True)
            case _:
                pass

    def serve(self, request_id: str) -> None:
        slots = self._facts.slots()
        self.agent.announce(request_id)
        for start in range(0, len(slots), self._facts.chunk_blocks):
            part = slots[start : start + self._facts.chunk_blocks]
            self.agent.ship(request_id, start, start + len(part), lease(start, part))
        self.agent.hand_off(request_id, HANDOFF)

    async def run(self) -> None:
        address = await self.agent.start()
        print(address.model_dump_json(), flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()
        await self.agent.close()
        print("bye", flush=True)


if __name__ == "__main__":
    # The loop of a real worker; the tests' side runs asyncio's own.
    uvloop.run(ContextProcess(ContextFacts.read(sys.argv[1])).run())
