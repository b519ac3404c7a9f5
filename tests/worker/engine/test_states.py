"""Layouts with recurrent states: chunks end where states are worth keeping, and others go on there.

The fake model reads every state back and raises for one of another length or prefix.
"""

from __future__ import annotations

import random

import pytest

from tests.support.sim_engines import (
    BLOCK,
    SimWorker,
    SimWorld,
    WorkerShape,
    expected,
    fake_plan,
    generate,
    random_prompt,
)
from worker.messages import Cancel

BUDGET = 4 * BLOCK
SHAPE = WorkerShape(
    slots=200, max_batch_tokens=BUDGET, max_running=16, max_sequence_tokens=256, replicas=1
)
MARKED = WorkerShape(
    slots=200,
    max_batch_tokens=BUDGET,
    max_running=16,
    max_sequence_tokens=256,
    replicas=1,
    state_alignment_tokens=BLOCK,
)


def state_world(shape: WorkerShape = SHAPE) -> tuple[SimWorld, SimWorker]:
    world = SimWorld(0, fake_plan(None, states=1))
    return world, world.worker("w", shape)


def ends(worker: SimWorker, first_step: int = 0) -> list[int]:
    """Where the chunks of a lone prompt ended."""
    batches = worker.executor.batches[first_step:]
    return [start + tokens for batch in batches for _, start, tokens in batch if tokens > 1]


def serve(world: SimWorld, worker: SimWorker, name: str, prompt: list[int]) -> int:
    """Answer one request; how many of its tokens were cached."""
    world.send(worker, generate(name, prompt))
    world.drain()
    assert world.choices[name, 0].tokens == expected(prompt)
    return world.started(worker, "generation", name).cached_tokens


def test_the_next_turn_goes_on_at_the_exact_end_of_the_last() -> None:
    world, worker = state_world()
    prompt = random_prompt(random.Random(1), 5 * BLOCK + 3)
    assert serve(world, worker, "a", prompt) == 0
    assert ends(worker) == [BUDGET, len(prompt)]
    # What was computed of the answer: its last token was never put in.
    turn = [*prompt, *expected(prompt)[:-1], 1, 2, 3]
    assert serve(world, worker, "b", turn) == len(turn) - 3
    # Another answer to the same prompt goes on where the prompt ended.
    assert serve(world, worker, "c", [*prompt, 95, 96, 95]) == len(prompt)


@pytest.mark.parametrize("shape", [SHAPE, MARKED])
def test_the_second_to_leave_a_prefix_keeps_its_state_for_the_third(shape: WorkerShape) -> None:
    world, worker = state_world(shape)
    rng = random.Random(2)
    shared = random_prompt(rng, 6 * BLOCK)
    tails = [random_prompt(rng, 3 * BLOCK + 1) for _ in range(3)]
    cached = [
        serve(world, worker, f"r{index}", [*shared, *tail]) for index, tail in enumerate(tails)
    ]
    assert cached == [0, 0, len(shared)]
    counters = worker.manager.counters
    assert counters.snapshots_recorded >= 1
    assert counters.snapshots_asked == 4  # three ends and one branch


def test_a_chunk_ends_on_a_point_unless_it_can_keep_the_state_on_the_way() -> None:
    rng = random.Random(3)
    shared, tail = random_prompt(rng, 2 * BLOCK), random_prompt(rng, BLOCK + 1)
    stops = {}
    for shape in (SHAPE, MARKED):
        world, worker = state_world(shape)
        serve(world, worker, "a", [*shared, *random_prompt(rng, BLOCK)])
        before = len(worker.executor.batches)
        serve(world, worker, "b", [*shared, *tail])
        stops[shape] = ends(worker, before)
        assert serve(world, worker, "c", [*shared, 96, 96, 96]) == len(shared)
    end = len(shared) + len(tail)
    assert stops == {SHAPE: [2 * BLOCK, end], MARKED: [end]}


@pytest.mark.parametrize("shape", [SHAPE, MARKED])
def test_the_owner_of_a_shared_prefix_is_asked_for_its_state_at_the_shared_end(
    shape: WorkerShape,
) -> None:
    world, worker = state_world(shape)
    rng = random.Random(4)
    common = random_prompt(rng, 20 * BLOCK)
    prompts = {f"r{index}": [*common, *random_prompt(rng, 6 + index)] for index in range(4)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
    computed = [world.ended(worker, "generation", name).prefill_tokens for name in prompts]
    assert computed == [len(common) + 6, 7, 8, 9]
    assert worker.manager.counters.prefix_waits == 3


def test_when_the_owner_is_gone_who_waited_starts_from_the_last_state() -> None:
    world, worker = state_world()
    prompt = random_prompt(random.Random(5), 20 * BLOCK)
    for name in ("a", "b"):
        world.send(worker, generate(name, [*prompt, 1]))
    world.run_until(lambda: len(worker.executor.batches) == 2)
    world.send(worker, Cancel(request_id="a"))
    world.drain()
    # It was cancelled between chunks: its state is that of all that it had computed.
    assert world.started(worker, "generation", "b").cached_tokens == 2 * BUDGET
    assert world.choices["b", 0].tokens == expected([*prompt, 1])


@pytest.mark.parametrize(("seed", "alignment"), [(0, None), (1, BLOCK)])
def test_many_prompts_with_common_beginnings_in_a_small_pool(
    seed: int, alignment: int | None
) -> None:
    world = SimWorld(seed, fake_plan(None, 9, states=2))
    small = WorkerShape(
        slots=30,
        max_batch_tokens=BUDGET,
        max_sequence_tokens=80,
        replicas=1,
        state_alignment_tokens=alignment,
    )
    worker = world.worker("w", small)
    rng = random.Random(seed)
    trunk = random_prompt(rng, 40)
    prompts = {
        f"r{index}": [*trunk[: rng.randint(0, 40)], *random_prompt(rng, rng.randint(1, 30))]
        for index in range(12)
    }
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, n=rng.randint(1, 2), deadline_ms=10**9))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
    assert worker.manager.counters.snapshots_recorded > 0
