"""A context rank in a process of its own: ``python -m tests.transfer.context_process SIZES``.

``SIZES`` is JSON: slot bytes and slots. Prints its address as JSON, then serves every grant: block
``i`` of a request of ``n`` prompt tokens comes from slot ``i``, whose bytes are ``(i + 1) % 256``,
``n`` blocks in chunks of four. Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from tests.transfer.agent_rig import (
    HANDOFF,
    PATIENT,
    TOKEN,
    VIEWS,
    ArrayMemory,
    lease,
    rank_info,
)
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import AgentEvent, GrantReceived, LeaseEnded, SessionEnded
from transfer.ucx.transport import UcxTransport

CHUNK_BLOCKS = 4


class ContextProcess:
    """Ships as soon as it is granted."""

    def __init__(self, slot_bytes: tuple[int, ...], num_slots: int) -> None:
        groups = {0: slot_bytes, 1: (2048,)}
        self._num_slots = num_slots
        memory = ArrayMemory(num_slots, groups)
        for array in memory.pools.values():
            for slot in range(num_slots):
                array[slot] = (slot + 1) % 256
        self.agent = TransferAgent(
            rank_info=rank_info("context", groups=groups),
            views=VIEWS,
            transport=UcxTransport("127.0.0.1"),
            memory=memory,
            config=AgentConfig(host="127.0.0.1", cluster_token=TOKEN, timing=PATIENT),
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
        blocks = self._num_slots
        self.agent.announce(request_id)
        for start in range(0, blocks, CHUNK_BLOCKS):
            end = min(start + CHUNK_BLOCKS, blocks)
            self.agent.ship(request_id, start, end, lease(start, list(range(start, end))))
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
    sizes = json.loads(sys.argv[1])
    # The loop of a real worker; the tests' side runs asyncio's own.
    uvloop.run(ContextProcess(tuple(sizes["slot_bytes"]), sizes["num_slots"]).run())
