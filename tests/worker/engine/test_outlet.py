"""The sending half of a connection, in both event loops, from several threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import uvloop

from worker.outlet import Outlet

FRAME = 8000
MANY = 3000
"""Frames of which no socket buffer holds all."""
WAIT_S = 20
LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop"),
]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


@dataclass
class Ends:
    """An outlet, its own reader and the other side."""

    outlet: Outlet
    reader: asyncio.StreamReader
    far: asyncio.StreamReader
    far_writer: asyncio.StreamWriter


@asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    accepted: asyncio.Future[tuple[Outlet, asyncio.StreamReader]] = (
        asyncio.get_running_loop().create_future()
    )

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((Outlet(writer, asyncio.get_running_loop()), reader))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    far, far_writer = await asyncio.open_connection(host, port, limit=1 << 12)
    outlet, reader = await accepted
    ends = Ends(outlet, reader, far, far_writer)
    try:
        yield ends
    finally:
        ends.outlet.abort()
        far_writer.close()
        server.close()


def frame(thread: int, number: int) -> bytes:
    return bytes((thread,)) + number.to_bytes(4, "little") + b"." * (FRAME - 5)


def run(make_loop: MakeLoop, work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(bounded())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_frames_of_several_threads_arrive_whole_and_each_threads_in_order(
    make_loop: MakeLoop,
) -> None:
    async def work() -> None:
        async with connected() as ends:

            def speak(thread: int) -> None:
                for number in range(MANY):
                    ends.outlet.send(frame(thread, number))

            threads = [threading.Thread(target=speak, args=(one,)) for one in range(2)]
            for thread in threads:
                thread.start()
            # Nobody has read: the threads are not held up by that.
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert ends.outlet.waiting_bytes > 0
            next_of = [0, 0]
            for _ in range(2 * MANY):
                got = await ends.far.readexactly(FRAME)
                assert got == frame(got[0], next_of[got[0]])
                next_of[got[0]] += 1
            assert next_of == [MANY, MANY]
            assert ends.outlet.waiting_bytes == 0

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_is_queued_goes_out_before_the_end_and_nothing_after(make_loop: MakeLoop) -> None:
    async def work() -> None:
        async with connected() as ends:
            for number in range(MANY):
                ends.outlet.send(frame(0, number))
            ends.outlet.finish()
            ends.outlet.send(frame(1, 0))
            ends.outlet.finish()
            got = await ends.far.read(-1)
            assert got == b"".join(frame(0, number) for number in range(MANY))

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_peer_that_reads_no_more_does_not_hold_a_finished_connection(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.outlet.FINISH_TIMEOUT_S", 0.05)

    async def work() -> None:
        async with connected() as ends:
            for number in range(MANY):
                ends.outlet.send(frame(0, number))
            ends.far_writer.write_eof()
            ends.outlet.finish()
            assert ends.outlet.waiting_bytes > 0
            for _ in range(1000):
                if not ends.outlet.waiting_bytes:
                    break
                await asyncio.sleep(0.01)
            assert not ends.outlet.waiting_bytes
            # Both halves are gone: what was on its way is all that the other side can read.
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ends.far.readexactly(MANY * FRAME)

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_thread_may_outlive_the_loop(make_loop: MakeLoop) -> None:
    """What it says is lost, which is all that is left to happen to it."""
    kept: list[Outlet] = []

    async def work() -> None:
        async with connected() as ends:
            kept.append(ends.outlet)
            for number in range(MANY):
                ends.outlet.send(frame(0, number))

    run(make_loop, work)
    for outlet in kept:
        outlet.send(frame(0, 0))
        outlet.abort()


@pytest.mark.parametrize("make_loop", LOOPS)
def test_an_abort_ends_both_halves_at_once(make_loop: MakeLoop) -> None:
    async def work() -> None:
        async with connected() as ends:
            for number in range(MANY):
                ends.outlet.send(frame(0, number))
            await asyncio.to_thread(ends.outlet.abort)
            assert await ends.reader.read() == b""
            ends.outlet.send(b"more")
            assert ends.outlet.waiting_bytes == 0
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await ends.far.readexactly(FRAME * MANY)

    run(make_loop, work)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_peer_that_is_gone_costs_its_speaker_nothing(make_loop: MakeLoop) -> None:
    async def work() -> None:
        async with connected() as ends:
            ends.far_writer.transport.abort()
            for number in range(MANY):
                ends.outlet.send(frame(0, number))
                await asyncio.sleep(0)
            assert ends.outlet.waiting_bytes == 0
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await ends.reader.readexactly(1)

    run(make_loop, work)
