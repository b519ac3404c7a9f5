"""The front-end server without an engine behind it: handshake, many connections, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.support.raw_front_end import RawFrontEnd
from transfer.identity import Incarnation, PeerAddress
from transfer.wire import HEADER, MAGIC, PROTOCOL_VERSION, pack_ints
from worker.config import WorkerAddress
from worker.connection import WorkerFacts
from worker.inbox import FrontEndCommand, FrontEndJoined, FrontEndLost, InboxItem
from worker.messages import (
    FRONT_END_CODEC,
    WORKER_CODEC,
    Cancel,
    Challenge,
    Hello,
    Ping,
    Refused,
    StepOutput,
)
from worker.server import FrontEndServer
from worker.token_runs import TokenRun

TOKEN = "token"
ME = Incarnation(instance="w", nonce="1")
FACTS = WorkerFacts(
    incarnation=ME,
    role="aggregated",
    model="tiny",
    tokens_per_block=64,
    max_sequence_tokens=100,
    vocab_size=50,
    peer=PeerAddress(incarnation=ME, host="127.0.0.1", control_port=1),
    transport="none",
    kv_dtype="float32",
)


@dataclass
class Rig:
    """A server and what it put into the inbox."""

    server: FrontEndServer
    address: WorkerAddress
    inbox: list[InboxItem]
    grown: asyncio.Event

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.inbox) < count:
                self.grown.clear()
                await self.grown.wait()


@contextlib.asynccontextmanager
async def serving(max_buffered_bytes: int = 1 << 20) -> AsyncIterator[Rig]:
    inbox: list[InboxItem] = []
    grown = asyncio.Event()

    def put(item: InboxItem) -> None:
        inbox.append(item)
        grown.set()

    server = FrontEndServer(
        FACTS,
        TOKEN,
        put=put,
        engine_age_ms=lambda: 42,
        max_buffered_bytes=max_buffered_bytes,
    )
    port = await server.start("127.0.0.1", 0)
    address = WorkerAddress(incarnation=ME, role="aggregated", host="127.0.0.1", port=port, pid=1)
    try:
        yield Rig(server, address, inbox, grown)
    finally:
        await server.close()


def output_of(request_id: str, tokens: int = 1) -> StepOutput:
    run = TokenRun(request_id=request_id, choice=0, start=0, tokens=pack_ints([7] * tokens))
    return StepOutput(runs=(run,))


async def test_commands_come_in_and_outputs_go_to_their_own_front_end() -> None:
    async with serving() as rig:
        first = await RawFrontEnd.connect(rig.address, TOKEN)
        second = await RawFrontEnd.connect(rig.address, TOKEN)
        second.send(Cancel(request_id="x"))
        await rig.until(3)
        assert rig.inbox[:2] == [FrontEndJoined(1), FrontEndJoined(2)]
        assert rig.inbox[2] == FrontEndCommand(2, Cancel(request_id="x"))
        rig.server.deliver([(1, output_of("a")), (2, output_of("b"))])
        await first.until(lambda: first.choices)
        await second.until(lambda: second.choices)
        assert list(first.choices) == [("a", 0)]
        assert list(second.choices) == [("b", 0)]
        await first.close()
        await rig.until(4)
        assert rig.inbox[3] == FrontEndLost(1)
        await second.close()


async def test_a_ping_never_reaches_the_engine() -> None:
    async with serving() as rig:
        front_end = await RawFrontEnd.connect(rig.address, TOKEN)
        front_end.send(Ping(sent_ms=5))
        await front_end.until(lambda: front_end.pongs)
        assert (front_end.pongs[0].sent_ms, front_end.pongs[0].engine_age_ms) == (5, 42)
        assert rig.inbox == [FrontEndJoined(1)]
        await front_end.close()


async def test_a_wrong_proof_is_refused_with_the_reason() -> None:
    async with serving() as rig:
        reader, writer = await asyncio.open_connection(rig.address.host, rig.address.port)
        assert isinstance(await WORKER_CODEC.read(reader), Challenge)
        FRONT_END_CODEC.write(writer, (Hello(front_end="x", proof=b"no", nonce=b"1" * 32),))
        refused = await WORKER_CODEC.read(reader)
        assert isinstance(refused, Refused)
        assert "cluster token" in refused.reason
        assert await reader.read() == b""
        assert rig.inbox == []
        writer.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"PF\x00\x63\x00\x00\x00\x00" * 3])
async def test_strangers_are_refused_and_change_nothing(garbage: bytes) -> None:
    async with serving() as rig:
        reader, writer = await asyncio.open_connection(rig.address.host, rig.address.port)
        await WORKER_CODEC.read(reader)
        writer.write(garbage)
        assert isinstance(await WORKER_CODEC.read(reader), Refused)
        assert rig.inbox == []
        writer.close()


async def test_a_stranger_may_not_announce_a_large_hello() -> None:
    async with serving() as rig:
        reader, writer = await asyncio.open_connection(rig.address.host, rig.address.port)
        await WORKER_CODEC.read(reader)
        writer.write(HEADER.pack(MAGIC, PROTOCOL_VERSION, 1 << 20))
        refused = await WORKER_CODEC.read(reader)
        assert isinstance(refused, Refused)
        assert "at most" in refused.reason
        writer.close()


async def test_a_front_end_that_does_not_read_is_cut_and_others_are_not_slowed() -> None:
    async with serving(max_buffered_bytes=100_000) as rig:
        slow = await RawFrontEnd.connect(rig.address, TOKEN)
        quick = await RawFrontEnd.connect(rig.address, TOKEN)
        slow.pause()
        await rig.until(2)
        for index in range(2000):
            rig.server.deliver([(1, output_of(f"s{index}", 2000)), (2, output_of(f"q{index}"))])
            if index % 50 == 0:
                await asyncio.sleep(0)
            if FrontEndLost(1) in rig.inbox:
                break
        await rig.until(3)
        assert rig.inbox[2] == FrontEndLost(1)
        rig.server.deliver([(2, output_of("last"))])
        await quick.until(lambda: ("last", 0) in quick.choices)
        await slow.close()
        await quick.close()


async def test_garbage_after_the_handshake_ends_the_connection() -> None:
    async with serving() as rig:
        front_end = await RawFrontEnd.connect(rig.address, TOKEN)
        front_end.send_raw(b"nonsense")
        await front_end.until(lambda: front_end.gone or front_end.refused)
        await rig.until(2)
        assert rig.inbox == [FrontEndJoined(1), FrontEndLost(1)]
        await front_end.close()


async def test_closing_the_server_cuts_everybody() -> None:
    async with serving() as rig:
        front_end = await RawFrontEnd.connect(rig.address, TOKEN)
        await rig.server.close()
        await front_end.until(lambda: front_end.gone)
        await front_end.close()
