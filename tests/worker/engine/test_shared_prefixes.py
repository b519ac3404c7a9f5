"""Prompts with one beginning that come at the same time: it is computed once."""

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
from worker.messages import Cancel

SHAPE = WorkerShape(slots=200, max_sequence_tokens=256)


def test_a_common_beginning_of_prompts_that_come_together_is_computed_once() -> None:
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    common = random_prompt(random.Random(1), 30 * BLOCK)
    prompts = {f"r{index}": [*common, index, index] for index in range(6)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
    prefilled = [world.ended(worker, "generation", name).prefill_tokens for name in prompts]
    assert sorted(prefilled) == [2] * 5 + [len(common) + 2]
    assert worker.manager.counters.prefix_waits == 5


def test_the_same_prompt_again_waits_for_the_first() -> None:
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    prompt = random_prompt(random.Random(1), 20 * BLOCK + 1)
    world.send(worker, generate("a", prompt))
    world.run_until(lambda: worker.executor.batches)
    world.send(worker, generate("b", prompt))
    world.drain()
    assert world.ended(worker, "generation", "b").prefill_tokens == 1
    assert world.choices["b", 0].tokens == expected(prompt)


def test_who_waits_is_not_in_the_way_of_others() -> None:
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    prompt = random_prompt(random.Random(1), 50 * BLOCK)
    for name in ("a", "b"):
        world.send(worker, generate(name, prompt))
    world.send(worker, generate("other", [1, 2, 3], max_tokens=2))
    world.run_until(lambda: ("other", 0) in world.choices)
    assert len(worker.executor.batches) <= 2
    world.drain()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_when_the_first_is_cancelled_one_of_those_who_wait_goes_on_where_it_was(
    steps: int,
) -> None:
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    prompt = random_prompt(random.Random(1), 40 * BLOCK)
    for name in ("a", "b", "c"):
        world.send(worker, generate(name, prompt))
    world.run_until(lambda: len(worker.executor.batches) >= steps)
    world.send(worker, Cancel(request_id="a"))
    world.drain()
    done = sum(world.ended(worker, "generation", name).prefill_tokens for name in ("b", "c"))
    assert done <= len(prompt) - steps * SHAPE.max_batch_tokens + BLOCK + 1
    for name in ("b", "c"):
        assert world.choices[name, 0].tokens == expected(prompt)


def test_nobody_waits_longer_than_the_prefix_is_worth() -> None:
    """The first gets no budget beside an older and many shorter ones: waiting for it ends."""
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    rng = random.Random(3)
    shared = random_prompt(rng, 4 * BLOCK)
    world.send(worker, generate("old", random_prompt(rng, 240)))
    world.send(worker, generate("first", [*shared, *random_prompt(rng, 150)], max_tokens=2))
    world.send(worker, generate("waits", [*shared, 1, 2]))
    waits = ("w", "generation", "waits")
    index = 0
    while waits not in world.legs:
        index += 1
        world.send(worker, generate(f"s{index}", random_prompt(rng, 8), max_tokens=1))
        assert world.step()
    # 2 + 4 x 16 / 16 steps of patience.
    assert len(worker.executor.batches) == 7
    assert world.started(worker, "generation", "waits").cached_tokens == 0
    world.drain()
