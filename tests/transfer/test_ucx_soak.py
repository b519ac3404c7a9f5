"""Thousands of transfers between two processes: nothing grows. Budget: 20 s."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from tests.support.process_facts import ProcessFacts
from tests.transfer.context_process import AT_HOME, ContextFacts
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import RankProcess, context_process
from tests.transfer.ucx_generations import generation_process

pytestmark = pytest.mark.ucx
LONG = (pytest.mark.slow, pytest.mark.timeout(900))
BATCH = 250
MIB = 1 << 20
FACTS = ContextFacts((4096, 1024), 8)
BYTES = 8 * (4096 + 1024 + 2048)
GROWTH_BYTES = MIB
"""Allowed from the end of the warm-up on. Less than that is what both ends remember of the last
four thousand requests by their ids, which the long soak's warm-up fills. A heap that takes a step
once is not a leak: what counts is the median batch, times the batches.
"""


async def batch(
    generation: RankProcess, context: RankProcess, first: int, cancel_every: int
) -> float:
    """Transfers one after another; seconds. Every page is right and home afterwards."""
    generation.process.order(f"soak {first} {BATCH} {cancel_every}")
    seconds = float((await generation.process.line_of("soaked")).split()[1])
    assert await generation.home() == AT_HOME
    assert await context.home() == AT_HOME
    return seconds


def facts(*ranks: RankProcess) -> list[ProcessFacts]:
    return [ProcessFacts.of(rank.process.pid) for rank in ranks]


@pytest.mark.parametrize(
    ("cancel_every", "warm_up", "count"),
    [
        pytest.param(3, 500, 1_000, id="a third of 1,000 cancelled"),
        pytest.param(0, 5_000, 10_000, id="10,000", marks=LONG),
        pytest.param(3, 5_000, 10_000, id="a third of 10,000 cancelled", marks=LONG),
    ],
)
async def test_transfers_leave_nothing_behind(cancel_every: int, warm_up: int, count: int) -> None:
    async with (
        context_process(FACTS) as context,
        generation_process(GenerationFacts(FACTS, context.address)) as generation,
    ):
        for start in range(0, warm_up, BATCH):
            await batch(generation, context, start, cancel_every)
        seen, seconds = [facts(generation, context)], 0.0
        for start in range(warm_up, warm_up + count, BATCH):
            seconds += await batch(generation, context, start, cancel_every)
            seen.append(facts(generation, context))
        for number, rank in enumerate(("generation", "context")):
            old, new = seen[0][number], seen[-1][number]
            grown = median(
                later[number].rss_bytes - earlier[number].rss_bytes
                for earlier, later in pairwise(seen)
            )
            print(
                f"{rank}: RSS {old.rss_bytes / MIB:.1f} to {new.rss_bytes / MIB:.1f} MiB, "
                f"{grown / BATCH:.1f} bytes a transfer; {new.descriptors} descriptors, "
                f"{new.threads} threads, {new.shared_segments} shared segments"
            )
            assert grown * count / BATCH < GROWTH_BYTES
            assert (new.descriptors, new.threads) == (old.descriptors, old.threads)
            assert new.shared_segments == old.shared_segments
        print(f"{count} transfers of {BYTES} bytes: {count / seconds:.0f} a second")
        assert await generation.finish() == 0
        assert await context.finish() == 0
