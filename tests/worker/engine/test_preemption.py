"""More work than pages: who gives way, how often, and what is said when nobody can."""

from __future__ import annotations

import random

import pytest

from tests.support.sim_engines import (
    BLOCK,
    SimWorld,
    WorkerShape,
    expected,
    generate,
    random_prompt,
)

OUTPUT = 60
ALONE = -(-(8 + OUTPUT) // BLOCK)
"""Blocks of one of the long generations."""


@pytest.mark.parametrize("seed", range(5))
def test_four_long_generations_finish_in_a_pool_for_one_and_a_half(seed: int) -> None:
    world = SimWorld(seed)
    worker = world.worker("w", WorkerShape(slots=ALONE * 3 // 2, max_sequence_tokens=8 + OUTPUT))
    rng = random.Random(seed)
    prompts = {f"r{index}": random_prompt(rng, 8) for index in range(4)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, max_tokens=OUTPUT, deadline_ms=10**9))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=OUTPUT)
        assert world.ended(worker, "generation", name).outcome == "succeeded"
    # The oldest is never the one to give way, so they end in order of arrival ...
    ends = [world.legs["w", "generation", name].ended_ms for name in prompts]
    assert ends == sorted(ends)
    assert worker.gauges is not None
    # ... each gives way at most once for every older one, and what is computed again is bounded.
    assert 1 <= worker.gauges.preemptions_total <= 6
    again = worker.executor.computed_tokens - 4 * (8 + OUTPUT - 1)
    assert 0 <= again <= worker.gauges.preemptions_total * (8 + OUTPUT)
    # At least one and a half of them decode at a time, on average.
    assert len(worker.executor.batches) <= 4 * OUTPUT


def test_who_waits_for_pages_that_never_come_ends_with_an_explanation_and_the_others_go_on() -> (
    None
):
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=12, max_sequence_tokens=48))
    rng = random.Random(1)
    prompts = {name: random_prompt(rng, 20) for name in ("old", "young")}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, max_tokens=20, deadline_ms=10**9))
    world.run_until(lambda: worker.manager.counters.sequences_suspended == 1)
    # Pages that no request and no transfer holds, and that nobody will give back.
    lost = worker.manager.open(b"lost", [], max_match=0)
    while lost.grow(lost.capacity + BLOCK):
        pass
    short = random_prompt(rng, 3)
    world.send(worker, generate("short", short, max_tokens=2))
    world.run_until(lambda: ("short", 0) in world.choices and world.clock.now < 10**8)
    for name in prompts:
        ended = world.ended(worker, "generation", name)
        assert (ended.outcome, ended.code, ended.retryable) == ("failed", "out_of_pages", True)
        for part in ("slots by pool group", "of (12,) can be had", "sequences are suspended"):
            assert part in ended.message
    lost.close()
    world.drain()
    assert world.choices["short", 0].tokens == expected(short, max_tokens=2)
