"""Two processes over the real UCX that stage: fragmented slots, other pages, a killed sender.

Budget: 15 s.
"""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest

from tests.support.devices import usable
from tests.transfer.agent_rig import Node
from tests.transfer.context_process import AT_HOME, UNFINISHED, ContextFacts
from tests.transfer.ucx_contexts import (
    RankProcess,
    complete,
    context_process,
    generation,
    is_right,
    is_stamped,
    stamp,
    start_request,
)
from transfer.agent_events import ChunkReceived, LeaseEnded, LeaseInDoubt, SessionEnded
from transfer.outcome import Outcome

pytestmark = pytest.mark.ucx
DEAR_US = 1e6
"""Whatever may be staged is."""
BLOCKS = 64
SMALL = (48 << 10, 16 << 10)
MEDIUM = (768 << 10, 256 << 10)
LARGE = (6 << 20, 2 << 20)
STAMP = 0x5A


def scattered(blocks: int) -> list[int]:
    return [int(slot) for slot in np.random.default_rng(2).permutation(blocks)]


async def one(node: Node, context: RankProcess, name: str, slots: list[int]) -> None:
    await start_request(node, context, name, slots)
    await complete(node, name, slots)


@pytest.mark.parametrize("message_us", [0.0, DEAR_US], ids=["runs", "staged"])
async def test_fragmented_slots_arrive_whole(message_us: float) -> None:
    slots = scattered(BLOCKS)
    async with (
        context_process(
            ContextFacts(SMALL, BLOCKS, stride=7, message_us=message_us, chunk_blocks=24)
        ) as context,
        generation(SMALL, BLOCKS) as node,
    ):
        took_ms = 0.0
        for number in range(6):
            name = f"r{number}"
            for array in node.memory.pools.values():
                array[:] = 0
            started = time.perf_counter()
            await start_request(node, context, name, slots)
            await node.engine.expect(LeaseEnded, name)
            took_ms = (time.perf_counter() - started) * 1e3
            await complete(node, name, slots)
        print(f"{BLOCKS} scattered blocks of 64 KiB: {took_ms:.1f} ms")
        assert node.agent.counters.bytes_total == 6 * BLOCKS * (sum(SMALL) + 2048)
        assert await context.finish() == 0


@pytest.mark.parametrize(("there", "here"), [(4, 16), (16, 8), (4, 8)])
async def test_other_page_sizes_are_laid_out_anew(there: int, here: int) -> None:
    slots = scattered(BLOCKS)
    async with (
        context_process(ContextFacts(SMALL, BLOCKS, stride=7, tokens_per_page=there)) as context,
        generation(SMALL, BLOCKS, tokens_per_page=here) as node,
    ):
        await one(node, context, "r", slots)
        assert await context.finish() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("there", "message_us"), [(16, DEAR_US), (4, 0.0)], ids=["short runs", "smaller pages"]
)
async def test_pages_on_a_gpu_are_staged_between_processes(there: int, message_us: float) -> None:
    usable("cuda")
    from tests.transfer.device_memory import CudaMemory

    slots = scattered(BLOCKS)
    async with (
        context_process(
            ContextFacts(
                LARGE,
                BLOCKS,
                stride=7,
                tokens_per_page=there,
                message_us=message_us,
                on_gpu=True,
            )
        ) as context,
        generation(LARGE, BLOCKS, memory=CudaMemory, cuda_device=0) as node,
    ):
        assert isinstance(node.memory, CudaMemory)
        took_ms = 0.0
        for number in range(6):
            name = f"r{number}"
            for array in node.memory.pools.values():
                array[:] = 0
            node.memory.upload()
            started = time.perf_counter()
            await start_request(node, context, name, slots)
            await node.engine.expect(LeaseEnded, name)
            took_ms = (time.perf_counter() - started) * 1e3
            node.memory.download()
            await complete(node, name, slots)
        print(f"{BLOCKS} blocks of 8 MiB over {set(node.agent.lanes.values())}: {took_ms:.1f} ms")
        assert node.agent.lanes == {str(context.address.rank_id): "cuda_ipc"}
        assert await context.finish() == 0


async def test_a_burst_shares_the_buffers_of_a_pair_while_half_of_it_is_cancelled() -> None:
    """Thirty-two requests at once. What a cancelled one leaves in a buffer reaches nobody's page,
    and no request waits for a buffer that does not come back.
    """
    together, blocks = 32, 16
    random = np.random.default_rng(10)
    order = scattered(together * blocks)
    parts = [order[blocks * n : blocks * (n + 1)] for n in range(together)]
    async with (
        context_process(ContextFacts(MEDIUM, blocks, stride=7, tokens_per_page=4)) as context,
        generation(MEDIUM, together * blocks) as node,
    ):

        async def cancelled(name: str, slots: list[int]) -> Outcome:
            await start_request(node, context, name, slots)
            for _ in range(int(random.integers(0, 200))):
                await asyncio.sleep(0)
            node.agent.cancel(name, "not wanted")
            await node.engine.expect(LeaseEnded, name)
            stamp(node, slots, STAMP)
            return (await node.engine.expect(SessionEnded, name)).outcome

        async with asyncio.TaskGroup() as group:
            leaving = [
                group.create_task(cancelled(f"r{n}#{n % blocks}", parts[n]))
                for n in range(0, together, 2)
            ]
            for n in range(1, together, 2):
                group.create_task(one(node, context, f"r{n}#{n % blocks}", parts[n]))
        outcomes = [task.result() for task in leaving]
        print(f"{outcomes.count(Outcome.CANCELLED)} of {len(outcomes)} cancelled before their end")
        assert Outcome.CANCELLED in outcomes
        assert await context.home() == AT_HOME
        for n in range(together):
            if n % 2:
                assert is_right(node, f"r{n}#{n % blocks}", parts[n])
            else:
                assert is_stamped(node, parts[n], STAMP)
        assert node.agent.counters.sessions_in_flight == 0
        assert node.agent.counters.staging_bytes_in_doubt == 0
        assert await context.finish() == 0


async def test_the_sender_is_killed_with_staged_receives_under_way() -> None:
    blocks = 32
    slots = scattered(blocks)
    async with generation(LARGE, blocks) as node:
        for number in range(3):
            name = f"{UNFINISHED}killed {number}"
            async with context_process(
                ContextFacts(LARGE, blocks, stride=7, tokens_per_page=4)
            ) as context:
                pages = await start_request(node, context, name, slots)
                await node.engine.expect(ChunkReceived, name)
                context.signal(signal.SIGKILL)
                end = await node.engine.expect(SessionEnded, name)
                assert end.outcome is Outcome.FAILED
                assert end.transferred_bytes < blocks * sum(LARGE)
                await node.engine.expect(LeaseEnded, name)
                assert (pages.releases, pages.quarantines) == (1, 0)
                assert not node.engine.of(LeaseInDoubt, name)
                for array in node.memory.pools.values():
                    array[:] = 0
                await asyncio.sleep(0.2)
                assert not any(array.any() for array in node.memory.pools.values())
        assert node.agent.counters.leases_in_doubt == 0
        async with context_process(
            ContextFacts(LARGE, blocks, stride=7, tokens_per_page=4)
        ) as again:
            await one(node, again, "next", slots)
