"""Ranks that are killed, and connections that break, over the real UCX. Budget: 15 s.

Nobody tells the survivor anything: it sees the loss, ends the request once, has its pages back, and
is through with the next peer at the same port at once.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from typing_extensions import override

from tests.support.process_facts import ProcessFacts
from tests.transfer.agent_rig import WAIT_S, Lease, Node, NodeFacts, Wire, start_node
from tests.transfer.context_process import AT_HOME, UNFINISHED, ContextFacts
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import (
    RankProcess,
    complete,
    context_process,
    generation,
    is_stamped,
    stamp,
    start_request,
)
from tests.transfer.ucx_generations import all_home, context_here, generation_process
from transfer.agent_events import AnnounceReceived, ChunkReceived, LeaseEnded, SessionEnded
from transfer.identity import PeerAddress
from transfer.outcome import Outcome
from transfer.transport import Endpoint, Expectation
from transfer.ucx.transport import UcxTransport

pytestmark = pytest.mark.ucx
BLOCKS = 16
FACTS = ContextFacts((2 << 20, 256 << 10), BLOCKS)
SMALL = ContextFacts((4096, 1024), BLOCKS)
FIRST, SECOND = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
STAMP = 0x5A


async def failed_once(node: Node, name: str) -> str:
    """The request has ended badly, once; why."""
    end = await node.engine.expect(SessionEnded, name)
    assert end.outcome is Outcome.FAILED
    assert len(node.engine.of(SessionEnded, name)) == 1
    return end.reason


async def more(node: Node, context: RankProcess, count: int, slots: list[int]) -> None:
    """So many requests that succeed, every byte right."""
    for number in range(count):
        name = f"{context.address.incarnation}"
        await start_request(node, context, f"{name} {number}#{number % BLOCKS}", slots)
        await complete(node, f"{name} {number}#{number % BLOCKS}", slots)


@pytest.mark.parametrize("moment", ["idle", "in mid-transfer"])
async def test_a_killed_context_rank_is_back_at_its_port(moment: str) -> None:
    async with generation(FACTS.slot_bytes, 2 * BLOCKS) as node:
        async with context_process(FACTS) as context:
            pages: Lease | None = None
            name = "r"
            if moment == "idle":
                node.agent.grant(name, (context.address,), 10, 20_000)
                await node.engine.expect(AnnounceReceived, name)
            else:
                name = f"{UNFINISHED}r"
                pages = await start_request(node, context, name, FIRST)
                await node.engine.expect(ChunkReceived, name)
            context.signal(signal.SIGKILL)
            killed = time.perf_counter()
            reason = await failed_once(node, name)
            print(f"noticed after {(time.perf_counter() - killed) * 1e3:.0f} ms: {reason}")
            if pages is not None:
                await node.engine.expect(LeaseEnded, name)
                assert (pages.releases, pages.quarantines) == (1, 0)
            stamp(node, FIRST, STAMP)
            assert await context.process.exit_code() == -signal.SIGKILL
        port = context.address.control_port
        async with context_process(replace(FACTS, control_port=port)) as again:
            assert again.address.incarnation != context.address.incarnation
            node.agent.grant("to the old one", (context.address,), 10, 20_000)
            assert "restarted" in await failed_once(node, "to the old one")
            await more(node, again, 20, SECOND)
            assert is_stamped(node, FIRST, STAMP)
            assert await again.home() == AT_HOME
        assert node.agent.counters.leases_in_doubt == 0


async def test_a_killed_generation_rank_is_back_at_its_port() -> None:
    async with context_here(FACTS) as (rank, address, ends):
        facts = GenerationFacts(FACTS, address)
        async with generation_process(facts) as receiver:
            receiver.process.order("signal SIGKILL r")
            receiver.process.order("start r")
            assert (await ends.of("r")).startswith("ended r failed")
            assert await all_home(rank) == AT_HOME
            port = receiver.address.control_port
        async with generation_process(replace(facts, control_port=port)) as again:
            assert again.address.incarnation != receiver.address.incarnation
            for number in range(20):
                again.process.order(f"start next#{number % BLOCKS}")
                end = await again.process.line_of(f"ended next#{number % BLOCKS}")
                assert end.endswith("succeeded received")
                await again.process.line_of(f"home next#{number % BLOCKS}")
            assert await again.home() == AT_HOME
        assert await all_home(rank) == AT_HOME


async def test_a_context_rank_is_killed_while_it_is_dialled() -> None:
    """From the first byte of the handshake to the first of a transfer takes about 50 ms."""
    async with generation(SMALL.slot_bytes, BLOCKS) as node:
        for number in range(8):
            async with context_process(SMALL) as context:
                node.agent.grant(f"r {number}", (context.address,), 10, 20_000)
                await asyncio.sleep(0.008 * number)
                context.signal(signal.SIGKILL)
                await failed_once(node, f"r {number}")
        assert node.agent.counters.sessions_in_flight == 0
        await settled([])


async def test_a_generation_rank_is_killed_while_it_dials() -> None:
    """The survivor is the one that dials the data endpoint."""
    async with context_here(SMALL) as (rank, address, _):
        facts = GenerationFacts(SMALL, address)
        for number in range(8):
            async with generation_process(facts) as receiver:
                receiver.process.order(f"start r {number}")
                await asyncio.sleep(0.008 * number)
                receiver.signal(signal.SIGKILL)
                await receiver.process.exit_code()
        async with generation_process(facts) as receiver:
            receiver.process.order("start next#3")
            assert "succeeded" in await receiver.process.line_of("ended next#3")
        assert await all_home(rank) == AT_HOME
        await settled([])


async def test_peers_that_come_and_die_leave_nothing_in_the_survivor() -> None:
    """Neither descriptors nor shared memory: the next one would find less of both. All but the
    first die in the middle of a transfer, between two messages: of one that dies within a message
    UCX keeps what the survivor had for it.
    """
    held: list[ProcessFacts] = []
    async with (
        generation(FACTS.slot_bytes, BLOCKS) as node,
        context_here(FACTS) as (_, address, ends),
    ):
        for number in range(6):
            name = f"{UNFINISHED}killed {number}"
            async with context_process(FACTS) as context:
                await more(node, context, 2, FIRST)
                await start_request(node, context, name, FIRST)
                if held:
                    await all_shipped(node, name)
                context.signal(signal.SIGKILL)
                await node.engine.expect(SessionEnded, name)
            async with generation_process(GenerationFacts(FACTS, address)) as receiver:
                name = name if held else "killed"
                receiver.process.order(f"start {name}")
                shipped = f"chunk {name} {BLOCKS - FACTS.chunk_blocks}"
                await receiver.process.line_of(shipped if held else f"home {name}")
                receiver.signal(signal.SIGKILL)
                await ends.of(name)
            held.append(await settled(held[:1]))
    print(f"after the first and the sixth death of each kind: {held[0]}, {held[-1]}")


async def all_shipped(node: Node, unfinished: str) -> None:
    """All but the last chunk is in."""
    for count in itertools.count(1):
        chunk = await node.engine.expect(ChunkReceived, unfinished, count)
        if chunk.end_block == BLOCKS - FACTS.chunk_blocks:
            return


async def settled(before: list[ProcessFacts]) -> ProcessFacts:
    """This process, once UCX has let go of peers that are gone: of their memory, and descriptors
    are no more than before.
    """
    end = time.monotonic() + WAIT_S
    while True:
        # Tests before this one leave their nodes to the collector.
        gc.collect()
        facts = ProcessFacts.of(os.getpid())
        gone = not facts.shared_segments
        if gone and all(facts.descriptors <= old.descriptors for old in before):
            return facts
        assert time.monotonic() < end, f"{facts}, before {before}"
        await asyncio.sleep(0.01)


class KeptEndpoint(UcxTransport):
    """A transport of one peer whose data connection can be broken."""

    expectation: Expectation | None = None

    @override
    async def expect(self, opening: bytes) -> Expectation:
        self.expectation = await super().expect(opening)
        return self.expectation

    async def break_endpoint(self) -> None:
        assert self.expectation is not None
        endpoint: Endpoint = self.expectation.endpoint.result()
        await self.close_endpoint(endpoint)


@asynccontextmanager
async def breakable() -> AsyncIterator[tuple[Node, KeptEndpoint]]:
    transport = KeptEndpoint("127.0.0.1")
    groups = FACTS.groups
    node = await start_node(
        "generation",
        transport,
        NodeFacts(num_slots=2 * BLOCKS, groups=groups, timing=FACTS.timing),
    )
    try:
        yield node, transport
    finally:
        await node.agent.close()


@pytest.mark.parametrize("which", ["control", "data"])
async def test_a_connection_that_breaks_in_mid_transfer_is_made_anew(which: str) -> None:
    async with breakable() as (node, transport), context_process(FACTS) as context:
        wire = Wire(context.address)
        through: PeerAddress = await wire.start()
        context.address = through
        name = f"{UNFINISHED}r"
        pages = await start_request(node, context, name, FIRST)
        await node.engine.expect(ChunkReceived, name)
        if which == "control":
            wire.cut()
        else:
            await transport.break_endpoint()
        await failed_once(node, name)
        await node.engine.expect(LeaseEnded, name)
        assert (pages.releases, pages.quarantines) == (1, 0)
        stamp(node, FIRST, STAMP)
        assert (await context.process.line_of(f"ended {name}")).startswith(f"ended {name} failed")
        await start_request(node, context, "next#3", SECOND)
        await complete(node, "next#3", SECOND)
        assert is_stamped(node, FIRST, STAMP)
        assert await context.home() == AT_HOME
        assert wire.connections == 2
        await wire.close()
