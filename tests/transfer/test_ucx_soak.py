"""Thousands of transfers between two processes: nothing grows. Budget: 20 s."""

from __future__ import annotations

import pytest

from tests.support.process_facts import ProcessFacts
from tests.transfer.context_process import AT_HOME, ContextFacts
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import RankProcess, context_process
from tests.transfer.ucx_generations import generation_process

pytestmark = pytest.mark.ucx
BATCH = 500
WARM_UP = 1500
MIB = 1 << 20
FACTS = ContextFacts((4096, 1024), 8)
BYTES = 8 * (4096 + 1024 + 2048)
GROWTH_BYTES = MIB
"""Allowed over a soak of any length: 1 MiB is 1 KiB a transfer of 1,000, 100 bytes of 10,000."""


async def soak(
    generation: RankProcess, context: RankProcess, first: int, count: int, cancel_every: int
) -> float:
    """Transfers one after another; seconds. Every page is right and home after each batch."""
    seconds = 0.0
    for start in range(first, first + count, BATCH):
        generation.process.order(f"soak {start} {BATCH} {cancel_every}")
        seconds += float((await generation.process.line_of("soaked")).split()[1])
        assert await generation.home() == AT_HOME
        assert await context.home() == AT_HOME
    return seconds


def facts(*ranks: RankProcess) -> list[ProcessFacts]:
    return [ProcessFacts.of(rank.process.pid) for rank in ranks]


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("cancel_every", [0, 3], ids=["whole", "every third cancelled"])
async def test_transfers_leave_nothing_behind(count: int, cancel_every: int) -> None:
    async with (
        context_process(FACTS) as context,
        generation_process(GenerationFacts(FACTS, context.address)) as generation,
    ):
        await soak(generation, context, 0, WARM_UP, cancel_every)
        before = facts(generation, context)
        seconds = await soak(generation, context, WARM_UP, count, cancel_every)
        for rank, old, new in zip(
            ("generation", "context"), before, facts(generation, context), strict=True
        ):
            grown = new.rss_bytes - old.rss_bytes
            print(
                f"{rank}: {grown / count:.1f} bytes of RSS a transfer, {new.rss_bytes / MIB:.1f} "
                f"MiB, {new.descriptors} descriptors, {new.threads} threads"
            )
            assert grown < GROWTH_BYTES
            assert (new.descriptors, new.threads) == (old.descriptors, old.threads)
            assert new.shared_segments == old.shared_segments
        print(f"{count / seconds:.0f} transfers of {BYTES} bytes a second")
        assert await generation.finish() == 0
        assert await context.finish() == 0
