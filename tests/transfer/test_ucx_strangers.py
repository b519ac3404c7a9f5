"""Who is not let in over the real UCX, and what all the others notice of it: nothing.

Budget: 10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import pytest
import pytest_asyncio
from typing_extensions import override

from tests.support.process_facts import ProcessFacts
from tests.transfer.agent_rig import PATIENT, TOKEN, WAIT_S, Node, NodeFacts, start_node
from tests.transfer.context_process import AT_HOME, ContextFacts
from tests.transfer.ucx_contexts import (
    RankProcess,
    complete,
    context_process,
    generation,
    start_request,
)
from transfer.agent_events import SessionEnded
from transfer.agent_peers import MAX_UNPROVED
from transfer.auth import mint_nonce
from transfer.control import ControlConnection, prove_as_generation
from transfer.messages import CONTROL_CODEC, Challenge, PeerRefused
from transfer.outcome import Outcome
from transfer.transport import Expectation, TransportError
from transfer.ucx.transport import UcxTransport
from transfer.wire import HEADER, MAGIC, PROTOCOL_VERSION

pytestmark = [pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]
BLOCKS = 16
FACTS = ContextFacts((4096, 1024), BLOCKS)
SLOTS = list(range(BLOCKS))
GARBAGE = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(32),
    HEADER.pack(MAGIC, PROTOCOL_VERSION, 1 << 30),
    HEADER.pack(MAGIC, PROTOCOL_VERSION, 64) + bytes(64),
    secrets.token_bytes(64 << 10),
)
UCX_HEADER_LIMIT = 1 << 10
"""UCX keeps the descriptor of a connection on which more than its header came, and no header."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def context() -> AsyncIterator[RankProcess]:
    """Strangers come and go; this rank serves on."""
    async with context_process(FACTS) as rank:
        yield rank


@pytest_asyncio.fixture(loop_scope="module")
async def node() -> AsyncIterator[Node]:
    async with generation(FACTS.slot_bytes, BLOCKS) as made:
        yield made


async def transfer(node: Node, context: RankProcess, name: str) -> None:
    """Whatever was tried, the next request is right."""
    await start_request(node, context, f"{name}#5", SLOTS)
    await complete(node, f"{name}#5", SLOTS)
    assert await context.home() == AT_HOME


async def refused(stranger: Node, context: RankProcess, name: str) -> str:
    stranger.agent.grant(name, (context.address,), 10, 20_000)
    end = await stranger.engine.expect(SessionEnded, name)
    assert end.outcome is Outcome.FAILED
    return end.reason


@contextlib.asynccontextmanager
async def other_node(
    facts: NodeFacts, transport: UcxTransport | None = None
) -> AsyncIterator[Node]:
    made = await start_node("other", transport or UcxTransport("127.0.0.1"), facts)
    try:
        yield made
    finally:
        await made.agent.close()


@dataclass
class Stranger:
    """A connection of somebody who is no rank."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def at(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def say(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def hears(self) -> bytes:
        """All that is answered, to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), WAIT_S)
        return b""


async def settled(pid: int, descriptors: int) -> ProcessFacts:
    """A process once it has no more than so many descriptors, or after a while."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while (facts := ProcessFacts.of(pid)).descriptors > descriptors:
        if asyncio.get_running_loop().time() > end:
            break
        await asyncio.sleep(0.01)
    return facts


async def test_a_wrong_cluster_token_is_told(context: RankProcess, node: Node) -> None:
    async with other_node(NodeFacts(token="another token", groups=FACTS.groups)) as stranger:
        for number in range(3):
            reason = await refused(stranger, context, f"r{number}")
            assert "PAGEFERRY_CLUSTER_TOKEN" in reason
    await transfer(node, context, "after a wrong token")


async def test_a_peer_that_does_not_fit_is_told_both_values(
    context: RankProcess, node: Node
) -> None:
    facts = NodeFacts(tokens_per_block=32, groups=FACTS.groups, timing=PATIENT)
    async with other_node(facts) as stranger:
        reason = await refused(stranger, context, "r")
        assert "tokens_per_block: ours is 32, the peer's is 16" in reason
        assert stranger.agent.refusals
    await transfer(node, context, "after a refusal")


async def test_another_version_is_told_both_numbers(context: RankProcess, node: Node) -> None:
    other = PROTOCOL_VERSION + 1
    reader, writer = await asyncio.open_connection("127.0.0.1", context.address.control_port)
    assert isinstance(await CONTROL_CODEC.read(reader), Challenge)
    writer.write(HEADER.pack(MAGIC, other, 1 << 20))
    refusal = await CONTROL_CODEC.read(reader)
    assert isinstance(refusal, PeerRefused)
    assert f"ours is {PROTOCOL_VERSION}, the peer's is {other}" in refusal.reasons[0]
    writer.close()
    await transfer(node, context, "after another version")


async def test_garbage_on_the_control_port(context: RankProcess, node: Node) -> None:
    await transfer(node, context, "before garbage")
    before = ProcessFacts.of(context.process.pid)
    for garbage in GARBAGE * 5:
        stranger = await Stranger.at(context.address.control_port)
        await stranger.say(garbage)
        if garbage:
            stranger.writer.write_eof()
            assert len(await stranger.hears()) < 1024
        stranger.writer.close()
    await transfer(node, context, "after garbage")
    after = await settled(context.process.pid, before.descriptors)
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)


async def test_half_open_connections_hold_up_nobody_who_has_something_to_say(
    context: RankProcess,
) -> None:
    """Twice as many as are waited for. The oldest give way, and the descriptors come back."""
    before = ProcessFacts.of(context.process.pid)
    strangers = [await Stranger.at(context.address.control_port) for _ in range(2 * MAX_UNPROVED)]
    async with generation(FACTS.slot_bytes, BLOCKS) as node:
        await transfer(node, context, "beside half-open connections")
    assert isinstance(CONTROL_CODEC.decode(await strangers[0].hears()), Challenge)
    held = ProcessFacts.of(context.process.pid)
    assert held.descriptors <= before.descriptors + MAX_UNPROVED
    for stranger in strangers:
        stranger.writer.close()
    after = await settled(context.process.pid, before.descriptors)
    assert after.descriptors == before.descriptors


async def test_a_hundred_ranks_prove_themselves_at_once(context: RankProcess) -> None:
    """As they do when a large cluster starts."""

    async def prove() -> None:
        host, port = context.address.host, context.address.control_port
        reader, writer = await asyncio.open_connection(host, port)
        await prove_as_generation(ControlConnection(reader, writer), TOKEN)
        writer.close()

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(prove() for _ in range(100)))


class WatchedPorts(UcxTransport):
    """Knows where its data listeners are."""

    port = 0

    @override
    async def expect(self, opening: bytes) -> Expectation:
        expectation = await super().expect(opening)
        self.port = expectation.address.port
        return expectation


async def test_garbage_and_half_open_connections_on_the_data_port(context: RankProcess) -> None:
    """What UCX keeps of them (a descriptor for each that sent a lot) ends with the pair."""
    transport = WatchedPorts("127.0.0.1")
    facts = NodeFacts(num_slots=BLOCKS, groups=FACTS.groups, timing=PATIENT)
    async with other_node(facts, transport) as node:
        await transfer(node, context, "before garbage")
        before = ProcessFacts.of(os.getpid())
        strangers = [await Stranger.at(transport.port) for _ in GARBAGE * 3]
        for stranger, garbage in zip(strangers, GARBAGE * 3, strict=True):
            await stranger.say(garbage)
        await transfer(node, context, "beside garbage")
        for stranger in strangers:
            stranger.writer.close()
        await transfer(node, context, "after garbage")
        large = sum(len(garbage) >= UCX_HEADER_LIMIT for garbage in GARBAGE * 3)
        after = await settled(os.getpid(), before.descriptors + large)
        assert after.descriptors <= before.descriptors + large
        assert node.agent.failure == ""
    assert (await settled(os.getpid(), before.descriptors)).descriptors < before.descriptors
    assert await context.home() == AT_HOME


async def test_a_dialler_without_the_opening_gets_no_endpoint(
    context: RankProcess, node: Node
) -> None:
    await node.agent.warm(context.address)
    stranger = UcxTransport("127.0.0.1")
    await stranger.start()
    expectation = await node.transport.expect(mint_nonce())
    with pytest.raises(TransportError):
        await stranger.connect(expectation.address, mint_nonce(), timeout_s=WAIT_S)
    assert not expectation.endpoint.done()
    expectation.close()
    await stranger.close()
    await transfer(node, context, "after a stranger")


async def test_a_control_port_that_is_taken_is_told_and_leaves_nothing(
    context: RankProcess,
) -> None:
    before = ProcessFacts.of(os.getpid())
    port = context.address.control_port
    with pytest.raises(OSError, match=f"control port {port}.*in use"):
        await start_node("late", UcxTransport("127.0.0.1"), NodeFacts(control_port=port))
    after = await settled(os.getpid(), before.descriptors)
    assert after.descriptors == before.descriptors
