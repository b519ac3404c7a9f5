"""Agents in two processes over the real UCX: transfers and cancellations. Budget: 15 s."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from tests.transfer.agent_rig import lease, token_rows
from tests.transfer.context_process import AT_HOME, ContextFacts, token_values
from tests.transfer.ucx_contexts import complete, context_process, generation, start_request
from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.outcome import Outcome

pytestmark = pytest.mark.ucx
SMALL = (4096, 1024)
LARGE = (8 << 20, 1 << 20)


async def test_requests_one_after_another_and_together() -> None:
    blocks = 16
    async with (
        context_process(ContextFacts(SMALL, blocks)) as context,
        generation(SMALL, 64 * blocks) as node,
    ):
        await node.agent.warm(context.address)
        assert set(node.agent.lanes.values()) == {"shm"}
        order = np.random.default_rng(0).permutation(64 * blocks).tolist()
        scattered = [order[blocks * n : blocks * (n + 1)] for n in range(64)]
        started = time.perf_counter()
        for number, slots in enumerate(scattered[:16]):
            await start_request(node, context, f"one {number}", slots)
            await complete(node, f"one {number}", slots)
        alone_s = (time.perf_counter() - started) / 16
        started = time.perf_counter()
        for number in range(len(scattered)):
            node.agent.grant(f"many {number}", (context.address,), 10, 20_000)
        for number, slots in enumerate(scattered):
            await node.engine.expect(AnnounceReceived, f"many {number}")
            node.agent.ready(f"many {number}", 0, blocks, lease(0, slots))
        for number, slots in enumerate(scattered):
            await complete(node, f"many {number}", slots)
        together_s = (time.perf_counter() - started) / 64
        print(f"16 scattered small blocks: {alone_s * 1e3:.1f} ms alone, {together_s * 1e3:.1f} ms")
        assert await context.finish() == 0


async def test_a_prompt_of_which_everything_or_all_but_a_block_is_there() -> None:
    """A transfer of no page is told as one, and one of a single block needs no other."""
    blocks = 16
    async with (
        context_process(ContextFacts(SMALL, blocks)) as context,
        generation(SMALL, blocks) as node,
    ):
        for wanted in (0, 1):
            name = f"{wanted} wanted"
            node.agent.grant(name, (context.address,), 10, 20_000)
            await node.engine.expect(AnnounceReceived, name)
            node.agent.ready(name, blocks - wanted, blocks, lease(blocks - wanted, [3][:wanted]))
            end = await node.engine.expect(SessionEnded, name)
            assert end.outcome is Outcome.SUCCEEDED
            assert end.transferred_blocks == wanted
            await node.engine.expect(LeaseEnded, name)
        for key in node.memory.pools:
            (rows,) = token_rows(node, key, [3])
            assert (rows == token_values(blocks - 1)[:, :, np.newaxis]).all()
        assert await context.home() == AT_HOME


async def test_large_pages_arrive_and_are_counted() -> None:
    blocks = 16
    async with (
        context_process(ContextFacts(LARGE, blocks)) as context,
        generation(LARGE, blocks) as node,
    ):
        slots = list(range(blocks))
        for number in range(3):
            await start_request(node, context, f"r{number}", slots)
            await complete(node, f"r{number}", slots)
        print(f"144 MiB a request, runs of 4 blocks: {node.agent.counters.gb_per_s:.2f} GB/s")
        assert node.agent.counters.bytes_total == 3 * blocks * (sum(LARGE) + 2048)


async def test_cancelled_in_mid_transfer_is_clean_and_quick() -> None:
    blocks = 16
    slots = list(range(blocks))
    async with (
        context_process(ContextFacts(LARGE, blocks)) as context,
        generation(LARGE, blocks) as node,
    ):
        for number in range(5):
            name = f"r{number}"
            await start_request(node, context, name, slots)
            await node.engine.expect(ChunkReceived, name)
            node.agent.cancel(name, "not wanted")
            await node.engine.expect(LeaseEnded, name)
            for array in node.memory.pools.values():
                array[:] = 0
            await asyncio.sleep(0.02)
            assert not any(array.any() for array in node.memory.pools.values())
        await start_request(node, context, "last", slots)
        await complete(node, "last", slots)


async def test_a_storm_of_cancellations_leaves_no_byte_and_no_page_behind() -> None:
    """Page sets are used again at once by the next request, cancelled or not before it."""
    blocks, together, rounds = 8, 4, 50
    slot_bytes = (128 << 10, 32 << 10)
    random = np.random.default_rng(7)
    async with (
        context_process(ContextFacts(slot_bytes, blocks)) as context,
        generation(slot_bytes, together * blocks) as node,
    ):

        async def one(name: str, slots: list[int], turns: int) -> Outcome:
            await start_request(node, context, name, slots)
            if turns < 30:
                for _ in range(turns):
                    await asyncio.sleep(0)
                node.agent.cancel(name, "not wanted")
            end = await node.engine.expect(SessionEnded, name)
            await node.engine.expect(LeaseEnded, name)
            if end.outcome is Outcome.SUCCEEDED:
                await complete(node, name, slots)
            for array in node.memory.pools.values():
                array[slots] = 0
            await asyncio.sleep(0)
            assert not any(array[slots].any() for array in node.memory.pools.values())
            return end.outcome

        async def lane(number: int) -> list[Outcome]:
            slots = list(range(number * blocks, (number + 1) * blocks))
            return [
                await one(f"r{number}-{turn}", slots, int(random.integers(0, 60)))
                for turn in range(rounds)
            ]

        outcomes = await asyncio.gather(*(lane(number) for number in range(together)))
        ended = [outcome for part in outcomes for outcome in part]
        assert set(ended) == {Outcome.SUCCEEDED, Outcome.CANCELLED}
        assert node.agent.counters.sessions_in_flight == 0
        assert node.agent.counters.leases_in_doubt == 0
        assert await context.finish() == 0
