"""The end of a control connection, on the event loops that run it: asyncio's and a worker's."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.transfer.agent_rig import PATIENT, WAIT_S
from transfer.control import ControlConnection, ControlLink, ControlTiming, refuse
from transfer.messages import CONTROL_CODEC, CancelSession, SessionMessage

Run = Callable[[Coroutine[Any, Any, None]], None]
CANCEL = CancelSession(session="s", reason="not wanted")


def nothing(_: SessionMessage) -> None:
    """No message comes."""


async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.StreamWriter]:
    """Our ends of a connection, and the peer's."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), "127.0.0.1")
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    server.close()
    return reader, writer, await accepted


def reset(peer: asyncio.StreamWriter) -> None:
    """What the kernel says for a process that is killed with words unread."""
    at_once = struct.pack("ii", 1, 0)
    peer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    peer.transport.abort()


async def closed(reader: asyncio.StreamReader) -> None:
    """The loop has closed the socket; whoever reads from it may have had no turn yet."""
    async with asyncio.timeout(WAIT_S):
        while reader.exception() is None:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def speak_to_a_link_that_was_reset() -> None:
    ends: list[str] = []
    reader, writer, peer = await connected()
    link = ControlLink(ControlConnection(reader, writer), PATIENT, nothing, ends.append)
    reset(peer)
    await closed(reader)
    link.send(CANCEL)
    link.refuse("does not fit")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(ends) == 1


async def refuse_a_connection_that_was_reset() -> None:
    reader, writer, peer = await connected()
    reset(peer)
    await closed(reader)
    refuse(ControlConnection(reader, writer), "does not fit")


async def test_a_message_that_breaks_its_receiver_ends_the_link_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A link that reads no more would go on beating, and its sessions would hear nothing."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def broken(_: SessionMessage) -> None:
        raise OverflowError("a number too large")

    reader, writer, peer = await connected()
    patient = ControlTiming(silence_ms=10**9)
    link = ControlLink(ControlConnection(reader, writer), patient, broken, ended.set_result)
    peer.write(CONTROL_CODEC.encode(CANCEL))
    async with asyncio.timeout(WAIT_S):
        assert "a number too large" in await ended
    assert not link.open
    assert "internal error" in caplog.text
    peer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "life", [speak_to_a_link_that_was_reset, refuse_a_connection_that_was_reset]
)
def test_a_reset_connection_takes_words_and_drops_them(
    run: Run, life: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """uvloop raises RuntimeError where asyncio ignores a write behind the end."""
    run(life())
