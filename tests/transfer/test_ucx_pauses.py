"""Ranks that are stopped and go on later, over the real UCX. Budget: 20 s.

A stopped process keeps its sockets and its shared memory. Its peer loses it by three missed
heartbeats, ends the request and uses the pages for something else; what the other does on waking
must reach none of them, and the pair must heal without help.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from tests.transfer.agent_rig import HANDOFF
from tests.transfer.context_process import AT_HOME, UNFINISHED, ContextFacts, fill_tokens
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import (
    complete,
    context_process,
    generation,
    is_stamped,
    stamp,
    start_request,
)
from tests.transfer.ucx_generations import (
    HoldingRank,
    all_home,
    context_here,
    generation_process,
)
from transfer.agent_events import ChunkReceived, LeaseEnded, SessionEnded
from transfer.outcome import Outcome

pytestmark = pytest.mark.ucx
BLOCKS = 16
BEAT_MS = 450
THREE_BEATS_MS = 3 * BEAT_MS
FACTS = ContextFacts((8 << 20, 1 << 20), BLOCKS, heartbeat_ms=BEAT_MS, silence_ms=THREE_BEATS_MS)
SMALL = replace(FACTS, slot_bytes=(4096, 1024))
FIRST, SECOND = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
STAMP = 0x5A
WAYS = [pytest.param(0.0, id="runs"), pytest.param(1e6, id="staged")]
"""What a message costs decides how pages travel."""


IN_FRAGMENTS = {"UCX_RNDV_THRESH": "inf", "UCX_TLS": "self,tcp,sysv"}
"""UCX ends no receive of a message of which a fragment has come."""


@pytest.mark.parametrize(
    ("message_us", "settings"),
    [
        pytest.param(0.0, {}, id="runs"),
        pytest.param(1e6, {}, id="staged"),
        pytest.param(0.0, IN_FRAGMENTS, id="runs in fragments"),
    ],
)
async def test_a_stopped_context_rank_writes_no_page_after_it_was_given_up(
    monkeypatch: pytest.MonkeyPatch, message_us: float, settings: dict[str, str]
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    async with (
        context_process(replace(FACTS, message_us=message_us)) as context,
        generation(FACTS.slot_bytes, 2 * BLOCKS, timing=FACTS.timing) as node,
    ):
        name = f"{UNFINISHED}r"
        pages = await start_request(node, context, name, FIRST)
        await node.engine.expect(ChunkReceived, name)
        context.signal(signal.SIGSTOP)
        end = await node.engine.expect(SessionEnded, name)
        assert end.outcome is Outcome.FAILED
        assert "no word from the peer" in end.reason
        await node.engine.expect(LeaseEnded, name)
        stamp(node, FIRST, STAMP)
        context.signal(signal.SIGCONT)
        await start_request(node, context, "next#3", SECOND)
        await complete(node, "next#3", SECOND)
        await context.process.line_of(f"ended {name}")
        assert await context.home() == AT_HOME
        assert is_stamped(node, FIRST, STAMP)
        assert (pages.releases, pages.quarantines) == (1, 0)
        assert len(node.engine.of(SessionEnded, name)) == 1


@pytest.mark.parametrize("message_us", WAYS)
async def test_a_stopped_generation_rank_takes_no_page_that_was_given_up(
    message_us: float,
) -> None:
    """The sender's pages hold something else when it goes on: that must not pass as the prompt. It
    stops between the first chunk and the others.
    """
    facts = replace(FACTS, message_us=message_us)
    async with context_here(facts, HoldingRank) as (rank, address, ends):
        async with generation_process(GenerationFacts(facts, address)) as receiver:
            receiver.process.order("signal SIGSTOP r")
            receiver.process.order("start r")
            await receiver.process.line_of("ready r")
            first, *others = range(0, BLOCKS, facts.chunk_blocks)
            rank.ship_chunk("r", first)
            await receiver.process.line_of("chunk r")
            for start in others:
                rank.ship_chunk("r", start)
            rank.agent.hand_off("r", HANDOFF)
            assert "no word from the peer" in await ends.of("r")
            assert await all_home(rank) == AT_HOME
            for array in rank.memory.pools.values():
                array[:] = STAMP
            receiver.signal(signal.SIGCONT)
            assert "failed" in await receiver.process.line_of("ended r")
            await receiver.process.line_of("home r")
            fill_tokens(rank.memory, FACTS)
            receiver.process.order("start next#3")
            await receiver.process.line_of("ready next#3")
            rank.ship("next#3")
            assert "succeeded" in await receiver.process.line_of("ended next#3")
            assert await receiver.home() == AT_HOME
        assert len(ends) == 2
        assert await all_home(rank) == AT_HOME


async def test_what_waits_unread_for_a_stopped_generation_rank_is_right_or_refused() -> None:
    """All of a transfer, hand-over and all, comes in the sleep of its receiver."""
    async with (
        context_here(SMALL, HoldingRank) as (rank, address, ends),
        generation_process(GenerationFacts(SMALL, address)) as receiver,
    ):
        receiver.process.order("start r")
        await receiver.process.line_of("ready r")
        receiver.signal(signal.SIGSTOP)
        rank.ship("r")
        await ends.of("r")
        assert await all_home(rank) == AT_HOME
        for array in rank.memory.pools.values():
            array[:] = STAMP
        receiver.signal(signal.SIGCONT)
        print(await receiver.process.line_of("ended r"))
        # A right page may have succeeded; a wrong one is counted.
        assert await receiver.home() == AT_HOME
        fill_tokens(rank.memory, SMALL)
        receiver.process.order("start next#3")
        await receiver.process.line_of("ready next#3")
        rank.ship("next#3")
        assert "succeeded" in await receiver.process.line_of("ended next#3")
        assert await receiver.home() == AT_HOME


async def test_a_stopped_context_rank_holds_up_nobody_who_dials_it() -> None:
    async with (
        context_process(SMALL) as context,
        generation(SMALL.slot_bytes, BLOCKS, timing=SMALL.timing) as node,
    ):
        context.signal(signal.SIGSTOP)
        node.agent.grant("r", (context.address,), 10, 300)
        end = await node.engine.expect(SessionEnded, "r")
        assert "no connection" in end.reason
        context.signal(signal.SIGCONT)
        await start_request(node, context, "next#3", FIRST)
        await complete(node, "next#3", FIRST)
        assert await context.home() == AT_HOME


async def test_a_pause_shorter_than_the_silence_costs_nobody_anything() -> None:
    """Eight requests wait for a generation rank that stands still, and all of them get through."""
    async with context_here(SMALL) as (rank, address, ends):
        facts = GenerationFacts(SMALL, address, requests=8)
        async with generation_process(facts) as receiver:
            receiver.process.order("start warm")
            await receiver.process.line_of("home warm")
            for number in range(8):
                receiver.process.order(f"start r {number}#{number}")
            await receiver.process.line_of("ready r 0#0")
            receiver.signal(signal.SIGSTOP)
            await asyncio.sleep(BEAT_MS / 1000)
            receiver.signal(signal.SIGCONT)
            for number in range(8):
                assert (await ends.of(f"r {number}#{number}")).endswith("succeeded received")
            assert await receiver.home() == AT_HOME
        assert await all_home(rank) == AT_HOME
