"""The server that front ends connect to: many connections, one engine, nobody waits for anybody.

Lives in the IO thread; only ``deliver`` and ``broadcast`` are called from the engine thread, which
hands outputs to the kernel itself: see :mod:`worker.outlet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from typing_extensions import override

from worker.connection import MAX_BUFFERED_BYTES, FrontEndConnection, WorkerFacts
from worker.inbox import InboxItem
from worker.messages import StepOutput
from worker.ports import Output


class FrontEndServer(Output):
    """Accepts front ends and carries the engine's outputs to them. Make it in the IO thread."""

    def __init__(
        self,
        facts: WorkerFacts,
        cluster_token: str,
        *,
        put: Callable[[InboxItem], None],
        engine_age_ms: Callable[[], int],
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._facts = facts
        self._cluster_token = cluster_token
        self._put = put
        self._engine_age_ms = engine_age_ms
        self._max_buffered_bytes = max_buffered_bytes
        self._numbers = count(1)
        self._connections: Mapping[int, FrontEndConnection] = {}
        """Replaced, never changed: the engine thread reads it, too."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._accept, host, port)
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def close(self) -> None:
        """Refuse new connections and cut those that are open. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @override
    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        connections = self._connections
        for number, output in outputs:
            connection = connections.get(number)
            if connection is not None:
                connection.send_output(output)

    @override
    def broadcast(self, output: StepOutput) -> None:
        for connection in self._connections.values():
            if connection.welcomed:
                connection.send_output(output)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = next(self._numbers)
        connection = FrontEndConnection(
            number, reader, writer, max_buffered_bytes=self._max_buffered_bytes
        )
        self._connections = {**self._connections, number: connection}
        try:
            await connection.serve(self._facts, self._cluster_token, self._engine_age_ms, self._put)
        except asyncio.CancelledError:
            # By close() alone. asyncio's streams would report it as an error of their own.
            connection.abort()
        finally:
            others = {**self._connections}
            del others[number]
            self._connections = others
            self._tasks.discard(task)
