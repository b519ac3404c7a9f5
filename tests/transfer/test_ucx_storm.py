"""Pairs of ranks whose connection is cut all the time and that are stopped in turn: none may die.

By hand, ``pytest -m slow tests/transfer/test_ucx_storm.py``: half a minute a seed, on a machine
that the pairs keep busy, and a crash that it is after may take several. A rank that dies of a
signal leaves a core where the failure says.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.transfer.agent_rig import Wire
from tests.transfer.context_process import AT_HOME, ContextFacts
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.ucx_contexts import RankProcess, context_process
from tests.transfer.ucx_generations import generation_process

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(180)]
STORM_S = 25.0
GAP_S = 0.1
STOPS_S = (0.02, 0.05, 0.1, 0.4, 0.6)
"""Shorter and longer than the silence after which a rank is lost."""
BATCH = 4
PAIRS = 4
FACTS = ContextFacts((4096, 1024), 8, heartbeat_ms=100, silence_ms=350, message_us=200, stride=3)


@pytest.mark.parametrize("seed", range(6))
async def test_cuts_and_stops_kill_no_rank(seed: int) -> None:
    found = await asyncio.gather(*(pair_in_storm(seed * PAIRS + pair) for pair in range(PAIRS)))
    assert found == [""] * PAIRS


async def pair_in_storm(seed: int) -> str:
    """What went wrong."""
    async with context_process(FACTS) as context:
        wire = Wire(context.address)
        address = await wire.start()
        async with generation_process(GenerationFacts(FACTS, address)) as generation:
            ranks = {"context": context, "generation": generation}
            for rank in ranks.values():
                leave_core(rank)
            work = asyncio.ensure_future(requests(generation))
            try:
                await storm(random.Random(seed), wire, context, generation)
                await work
                for rank in ranks.values():
                    assert await rank.home() == AT_HOME
                assert [await rank.finish() for rank in ranks.values()] == [0, 0]
            except (AssertionError, ProcessLookupError) as error:
                work.cancel()
                return f"seed {seed}: {error!r}; {await causes(ranks)}"
            finally:
                await wire.close()
            return ""


async def storm(
    chance: random.Random, wire: Wire, context: RankProcess, generation: RankProcess
) -> None:
    """Cut and stop at random, to its end."""
    end = time.monotonic() + STORM_S
    while time.monotonic() < end:
        await asyncio.sleep(chance.random() * GAP_S)
        if chance.random() < 0.6:
            wire.cut()
            continue
        rank = context if chance.random() < 0.7 else generation
        rank.signal(signal.SIGSTOP)
        await asyncio.sleep(chance.choice(STOPS_S))
        rank.signal(signal.SIGCONT)


async def requests(generation: RankProcess) -> None:
    """One after another, every third cancelled at some moment, until the storm is over."""
    end, number = time.monotonic() + STORM_S, 0
    while time.monotonic() < end:
        generation.process.order(f"soak {number} {BATCH} 3")
        await generation.process.line_of("soaked")
        number += BATCH


def leave_core(rank: RankProcess) -> None:
    """As far as the limits of this user allow."""
    _, most = resource.prlimit(rank.process.pid, resource.RLIMIT_CORE)
    resource.prlimit(rank.process.pid, resource.RLIMIT_CORE, (most, most))


async def causes(ranks: dict[str, RankProcess]) -> str:
    """How the ranks ended, and where to look for their cores."""
    said = [f"the {name} rank {await ending(rank)}" for name, rank in ranks.items()]
    return f"{', '.join(said)}; cores go to {core_pattern()!r}, from {os.getcwd()}"


def core_pattern() -> str:
    """Relative to where the tests were started, or a program that keeps cores."""
    return Path("/proc/sys/kernel/core_pattern").read_text().strip()


async def ending(rank: RankProcess) -> str:
    """A rank that lives is killed."""
    try:
        rank.signal(signal.SIGKILL)
    except ProcessLookupError:
        code = await rank.process.exit_code()
        return f"(process {rank.process.pid}) had died: exit code {code}"
    return "was alive"
