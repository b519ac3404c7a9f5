"""A generation rank here and context ranks in processes of their own, over the real UCX."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

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
from tests.transfer.context_process import token_values
from transfer.agent_events import (
    AnnounceReceived,
    HandoffReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.identity import PeerAddress
from transfer.outcome import Outcome
from transfer.ucx.transport import UcxTransport


@dataclass
class Context:
    """The other process."""

    process: asyncio.subprocess.Process
    address: PeerAddress

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), WAIT_S)).decode().strip()

    async def finish(self) -> int:
        """Close its stdin and wait for a clean end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


@asynccontextmanager
async def context_process(
    slot_bytes: tuple[int, ...], num_slots: int, **facts: float
) -> AsyncIterator[Context]:
    """A context rank in a process of its own, with further facts of ``ContextFacts``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transfer.context_process",
        json.dumps({"slot_bytes": slot_bytes, "num_slots": num_slots, **facts}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        yield Context(process, PeerAddress.model_validate_json(line))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def generation(
    slot_bytes: tuple[int, ...],
    num_slots: int,
    tokens_per_page: int = TOKENS_PER_BLOCK,
    memory: type[ArrayMemory] = ArrayMemory,
    cuda_device: int | None = None,
) -> AsyncIterator[Node]:
    """A generation rank in this process."""
    facts = NodeFacts(
        num_slots=num_slots,
        groups={0: slot_bytes, 1: (2048,)},
        timing=PATIENT,
        tokens_per_page=tokens_per_page,
        memory=memory,
    )
    node = await start_node("generation", UcxTransport("127.0.0.1", cuda_device=cuda_device), facts)
    try:
        yield node
    finally:
        await node.agent.close()


async def start_request(
    node: Node, context: Context, request_id: str, slots: list[int], deadline_ms: int = 20_000
) -> Lease:
    """Up to the pages."""
    node.agent.grant(request_id, (context.address,), 10, deadline_ms)
    await node.engine.expect(AnnounceReceived, request_id)
    pages = lease(0, slots)
    node.agent.ready(request_id, 0, len(slots), pages)
    return pages


async def complete(node: Node, request_id: str, slots: list[int]) -> None:
    """To the end, and every byte as the context rank has it."""
    await node.engine.expect(HandoffReceived, request_id)
    end = await node.engine.expect(SessionEnded, request_id)
    assert end.outcome is Outcome.SUCCEEDED
    await node.engine.expect(LeaseEnded, request_id)
    for key in node.memory.pools:
        for block, slot in enumerate(slots):
            (rows,) = token_rows(node, key, [slot])
            assert (rows == token_values(block)[:, :, np.newaxis]).all()
