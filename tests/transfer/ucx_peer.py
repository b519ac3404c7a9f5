"""The other process of a UCX test: expects one dialler and obeys one command a line on stdin,
answering with one line each on stdout.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from transfer.transport import Completion, Endpoint
from transfer.ucx.transport import UcxTransport

OPENING = b"peer".ljust(32, b"-")


class Peer:
    """Holds what it posts and answers when it ends."""

    def __init__(self) -> None:
        self.transport = UcxTransport("127.0.0.1")
        self.endpoint: Endpoint | None = None

    def bound(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        endpoint.on_lost(lambda reason: say(f"lost {reason}"))

    def obey(self, line: str) -> bool:
        """``send TAG SIZE VALUE``, ``receive TAG SIZE``, ``close`` (the endpoint), ``quit``."""
        verb, *words = line.split()
        if verb == "quit":
            return False
        if self.endpoint is None:
            raise RuntimeError("nobody has dialled")
        numbers = [int(word) for word in words]
        if verb == "send":
            tag, size_bytes, value = numbers
            data = np.full(size_bytes, value, np.uint8)
            self.endpoint.post_send(data, tag, lambda end: say(f"sent {describe(end)}"))
        elif verb == "receive":
            tag, size_bytes = numbers
            into = np.zeros(size_bytes, np.uint8)
            self.endpoint.post_receive(
                into, tag, lambda end: say(f"received {describe(end)} {int(into.sum())}")
            )
        return True

    async def run(self) -> None:
        await self.transport.start()
        expectation = await self.transport.expect(OPENING)
        expectation.endpoint.add_done_callback(
            lambda future: None if future.cancelled() else self.bound(future.result())
        )
        say(f"port {expectation.address.port}")
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().strip():
            if line == "close" and self.endpoint is not None:
                await self.transport.close_endpoint(self.endpoint)
                say("closed")
            elif not self.obey(line):
                break
        await self.transport.close()
        say("bye")


def describe(completion: Completion) -> str:
    return completion.status.value


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """The process's life."""
    asyncio.run(Peer().run())
