"""More work than pages: who gives way, how often, and what is said when nobody can."""

from __future__ import annotations

import random

import pytest

from tests.support.sim_engines import (
    BLOCK,
    SimWorld,
    WorkerShape,
    expected,
    fake_plan,
    generate,
    prefill,
    random_prompt,
)

OUTPUT = 60
ALONE = -(-(8 + OUTPUT) // BLOCK)
"""Blocks of one of the long generations."""


@pytest.mark.parametrize(("seed", "states"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)])
def test_four_long_generations_finish_in_a_pool_for_one_and_a_half(seed: int, states: int) -> None:
    world = SimWorld(seed, fake_plan(states=states))
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


def test_who_was_suspended_is_not_kept_out_by_a_stream_of_new_requests() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=ALONE * 3 // 2, max_sequence_tokens=8 + OUTPUT))
    rng = random.Random(2)
    long = {name: random_prompt(rng, 8) for name in ("old", "young")}
    for name, prompt in long.items():
        world.send(worker, generate(name, prompt, max_tokens=OUTPUT, deadline_ms=10**9))
    shorts: list[str] = []
    while ("w", "generation", "young") not in world.legs or not world.legs[
        "w", "generation", "young"
    ].ended:
        shorts.append(f"s{len(shorts)}")
        prompt = random_prompt(rng, 2 * BLOCK)
        world.send(worker, generate(shorts[-1], prompt, max_tokens=2, deadline_ms=10**9))
        worker.turn()
        assert len(worker.executor.batches) < 1000
    taken = len(worker.executor.batches)
    world.drain()
    for name, prompt in long.items():
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=OUTPUT)
    assert worker.gauges is not None
    assert worker.gauges.preemptions_total >= 1
    # Both at once at first, then one after the other, with what gave way computed again.
    again = worker.gauges.preemptions_total
    assert taken <= 2 * OUTPUT + again + 8
    assert {world.ended(worker, "generation", name).outcome for name in shorts} == {"succeeded"}


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 2), (2, 3)])
def test_workers_that_prefill_for_each_other_in_small_pools_never_wait_in_a_circle(
    seed: int, count: int
) -> None:
    """Each has promised its room to the others' prompts, and has prompts of its own."""
    world = SimWorld(seed)
    shape = WorkerShape(slots=16, max_sequence_tokens=44)
    workers = [world.worker(f"w{index}", shape) for index in range(count)]
    rng = random.Random(seed)
    prompts = {f"r{index}": random_prompt(rng, rng.randint(8, 36)) for index in range(18)}
    for index, (name, prompt) in enumerate(prompts.items()):
        context, other = workers[index % count], workers[(index + 1) % count]
        world.send(context, prefill(name, prompt, other.incarnation, deadline_ms=10**9))
        source = context.address
        world.send(other, generate(name, prompt, source=source, deadline_ms=10**9))
    world.drain(limit=5_000)
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
    legs = [ended for heard in world.legs.values() for ended in heard.ended]
    assert [ended.outcome for ended in legs] == ["succeeded"] * 2 * len(prompts)
    for worker in workers:
        assert worker.gauges is not None
        assert worker.gauges.preemptions_total <= len(prompts)
