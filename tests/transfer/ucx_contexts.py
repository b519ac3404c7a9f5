"""A generation rank here and context ranks in processes of their own, over the real UCX."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from tests.support.forked import Forked, forked
from tests.transfer.agent_rig import (
    PATIENT,
    TOKENS_PER_BLOCK,
    WAIT_S,
    ArrayMemory,
    Lease,
    Node,
    NodeFacts,
    lease,
    start_node,
    token_rows,
)
from tests.transfer.context_process import (
    AT_HOME,
    ContextFacts,
    RankState,
    first_content,
    token_values,
)
from tests.transfer.context_process import main as context_main
from transfer.agent_events import (
    AnnounceReceived,
    HandoffReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.control import ControlTiming
from transfer.identity import PeerAddress
from transfer.outcome import Outcome
from transfer.ucx.transport import UcxTransport


@dataclass
class RankProcess:
    """A rank in a process of its own."""

    process: Forked
    address: PeerAddress

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)

    async def line(self) -> str:
        return await self.process.line()

    async def state(self) -> RankState:
        """What it says of itself; whatever it has said before is passed over."""
        self.process.order("state")
        while not (line := await self.process.line()).startswith("{"):
            assert line, "the process has ended"
        return RankState(**json.loads(line))

    async def home(self) -> RankState:
        """What it says once nothing runs and no lease is out, or after a while."""
        end = time.monotonic() + WAIT_S
        while (state := await self.state()) != AT_HOME and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return state

    async def finish(self) -> int:
        """Close its stdin and wait for a clean end."""
        return await self.process.finish()


@asynccontextmanager
async def context_process(facts: ContextFacts) -> AsyncIterator[RankProcess]:
    """A context rank in a process of its own."""
    async with forked(context_main, facts.text()) as process:
        yield RankProcess(process, PeerAddress.model_validate_json(await process.line()))


@asynccontextmanager
async def generation(
    slot_bytes: tuple[int, ...],
    num_slots: int,
    tokens_per_page: int = TOKENS_PER_BLOCK,
    timing: ControlTiming = PATIENT,
    memory: type[ArrayMemory] = ArrayMemory,
    cuda_device: int | None = None,
) -> AsyncIterator[Node]:
    """A generation rank in this process."""
    facts = NodeFacts(
        num_slots=num_slots,
        groups={0: slot_bytes, 1: (2048,)},
        timing=timing,
        tokens_per_page=tokens_per_page,
        memory=memory,
    )
    node = await start_node("generation", UcxTransport("127.0.0.1", cuda_device=cuda_device), facts)
    try:
        yield node
    finally:
        await node.agent.close()


async def start_request(
    node: Node, context: RankProcess, request_id: str, slots: list[int], deadline_ms: int = 20_000
) -> Lease:
    """Up to the pages."""
    node.agent.grant(request_id, (context.address,), 10, deadline_ms)
    await node.engine.expect(AnnounceReceived, request_id)
    pages = lease(0, slots)
    node.agent.ready(request_id, 0, len(slots), pages)
    return pages


async def complete(node: Node, request_id: str, slots: list[int], first_block: int = 0) -> None:
    """To the end, and every byte as the context rank has it; ``slots`` start at ``first_block``."""
    await node.engine.expect(HandoffReceived, request_id)
    end = await node.engine.expect(SessionEnded, request_id)
    assert end.outcome is Outcome.SUCCEEDED
    await node.engine.expect(LeaseEnded, request_id)
    assert is_right(node, request_id, slots, first_block)


def is_right(node: Node, request_id: str, slots: list[int], first_block: int = 0) -> bool:
    """Whether every byte of the request's pages is the context rank's."""
    blocks, shift = first_block + len(slots), first_content(request_id)
    values = np.stack([token_values((shift + n) % blocks) for n in range(first_block, blocks)])
    return all(
        bool((token_rows(node, key, slots) == values[..., np.newaxis]).all())
        for key in node.memory.pools
    )


def stamp(node: Node, slots: list[int], value: int) -> None:
    """The pages are somebody else's from now on."""
    for array in node.memory.pools.values():
        array[slots] = value


def is_stamped(node: Node, slots: list[int], value: int) -> bool:
    """Whether nothing was written since :func:`stamp`."""
    return all(bool((array[slots] == value).all()) for array in node.memory.pools.values())
