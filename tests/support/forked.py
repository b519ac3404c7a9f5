"""Processes that tests kill and stop, forked from a server that has imported the heavy libraries.

A fresh interpreter imports UCX, numpy and pydantic for more than a second of processor time; a fork
of a process that has done so, and nothing more, is up in 40 ms. It is a process like any other: it
makes its own UCX context, and a signal ends it alone. Lines go both ways over its standard streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerProcess

PRELOADED = (
    # A child runs the file that started its parent, which is pytest's.
    "pytest",
    "tests.transfer.context_process",
    "tests.transfer.generation_process",
    "tests.transfer.held_dialler",
    "tests.transfer.rank_process",
    "tests.transfer.slow_listener",
    "tests.transfer.ucx_peer",
    "tests.transfer.unattachable_peer",
    "tests.support.loaded_ucx",
)
WAIT_S = 20.0


class Forked:
    """A running child, from the test's event loop."""

    def __init__(
        self,
        process: ForkServerProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    def order(self, line: str) -> None:
        """One line on its standard input."""
        self._writer.write(line.encode() + b"\n")

    async def line(self) -> str:
        """The next line of its standard output; empty when it has ended."""
        return (await asyncio.wait_for(self._reader.readline(), WAIT_S)).decode().strip()

    async def line_of(self, *words: str) -> str:
        """The next line that starts with these words; others are passed over."""
        start = " ".join(words)
        while (line := await self.line()) and line != start and not line.startswith(start + " "):
            pass
        assert line, f"the process ended without a line {start!r}"
        return line

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def exit_code(self) -> int:
        """Wait for its end; negative for a signal."""
        await asyncio.to_thread(self._process.join, WAIT_S)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} still runs after {WAIT_S} s"
        return code

    async def finish(self) -> int:
        """Close its standard input and wait for its end."""
        self._writer.write_eof()
        return await self.exit_code()


@asynccontextmanager
async def forked(
    main: Callable[..., None], *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Forked]:
    """Run ``main(*arguments)``, which must be importable, in a process that is gone afterwards.

    It has this process's environment and ``environment``.
    """
    # One each way: the child reads without blocking and writes blocking.
    orders_here, orders_there = socket.socketpair()
    lines_here, lines_there = socket.socketpair()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(
        target=_run,
        args=(main, (orders_there, lines_there), {**os.environ, **(environment or {})}, arguments),
        daemon=True,
    )
    # The first start waits until the server has imported everything.
    await asyncio.to_thread(process.start)
    orders_there.close()
    lines_there.close()
    reader, no_orders = await asyncio.open_connection(sock=lines_here)
    _, writer = await asyncio.open_connection(sock=orders_here)
    child = Forked(process, reader, writer)
    try:
        yield child
    finally:
        process.kill()
        await child.exit_code()
        process.close()
        for stream in (writer, no_orders):
            stream.close()
            with contextlib.suppress(ConnectionError):
                await stream.wait_closed()


def _run(
    main: Callable[..., None],
    streams: tuple[socket.socket, socket.socket],
    environment: Mapping[str, str],
    arguments: tuple[str, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    main(*arguments)
    sys.stdout.flush()
