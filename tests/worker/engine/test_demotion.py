"""Prompts that lack much come after the others, for a while: by what they really lack."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sim_engines import (
    BLOCK,
    SimWorker,
    SimWorld,
    WorkerShape,
    expected,
    generate,
    random_prompt,
)
from worker.messages import Cancel
from worker.scheduler import Demotion, Item, Limits, Phase, Verdict, plan_admission

BUDGET, MAX_ITERS = 1024, 2
ESTIMATE, REMAINDER = 256, 10_000
LONG = REMAINDER + ESTIMATE
SHORT = 256
DEMOTION = Demotion(uncached_tokens=512, max_iters=MAX_ITERS)
LONG_SLOTS, SHORT_SLOTS = LONG // BLOCK + 1, SHORT // BLOCK
SLOTS = LONG_SLOTS + SHORT_SLOTS // 2
"""A short prompt does not fit beside the long one."""
SHAPE = WorkerShape(
    slots=SLOTS,
    max_batch_tokens=BUDGET,
    max_running=64,
    max_sequence_tokens=LONG + 10,
    demotion=DEMOTION,
)


def queued(key: int, uncached: int, demoted: int = 0, slots: int = 1) -> Item:
    return Item(key, Phase.QUEUED, (key, 0), (slots,), uncached=uncached, demoted=demoted)


def admitted(*items: Item, slots: int = 10) -> tuple[tuple[int, ...], tuple[int, ...]]:
    limits = Limits(BUDGET, max_running=8, total=(slots,), demotion=DEMOTION)
    plan = plan_admission(items, (slots,), limits)
    return plan.admit, plan.demoted


def test_a_prompt_that_lacks_much_is_admitted_last_until_it_is_starved() -> None:
    assert admitted(queued(1, 513), queued(2, 512)) == ((2, 1), (1,))
    assert admitted(queued(1, 512), queued(2, 512)) == ((1, 2), ())
    assert admitted(queued(1, 513, MAX_ITERS), queued(2, 512)) == ((1, 2), ())
    assert admitted(queued(1, 513, slots=6), queued(2, 5, slots=6)) == ((2,), (1,))


def test_who_comes_after_nobody_younger_does_not_age() -> None:
    assert admitted(queued(1, 5), queued(2, 513)) == ((1, 2), ())
    assert admitted(queued(1, 600), queued(2, 600)) == ((1, 2), ())


@pytest.mark.parametrize(
    ("lacking", "found", "demoted", "verdict"),
    [
        (ESTIMATE, REMAINDER, 0, Verdict.DEFER),
        (ESTIMATE, REMAINDER, MAX_ITERS - 1, Verdict.DEFER),
        (ESTIMATE, REMAINDER, MAX_ITERS, Verdict.START),
        (ESTIMATE, ESTIMATE, 0, Verdict.START),
        (REMAINDER, REMAINDER, 0, Verdict.START),
        (REMAINDER, ESTIMATE, 0, Verdict.START),
    ],
)
def test_only_who_was_ordered_short_and_is_long_and_not_starved_is_deferred(
    lacking: int, found: int, demoted: int, verdict: Verdict
) -> None:
    assert DEMOTION.verdict(expected=lacking, found=found, demoted=demoted) is verdict


def lost_before_it_is_matched(world: SimWorld, worker: SimWorker, prompt: list[int]) -> None:
    """Its prefix was cached when it was looked up and is not when there is room for it."""
    world.send(worker, generate("warm", prompt[:REMAINDER], max_tokens=1))
    world.drain()
    filler = random_prompt(random.Random(9), BLOCK * (SLOTS - REMAINDER // BLOCK) - BLOCK)
    world.send(worker, generate("filler", filler, max_tokens=3))
    world.run_until(lambda: ("filler", 0) in world.choices)
    world.send(worker, generate("long", prompt))
    worker.turn()
    assert ("w", "generation", "long") not in world.legs  # no room for it yet
    worker.manager.clear()
    world.send(worker, Cancel(request_id="filler"))


def not_computed_after_all(world: SimWorld, worker: SimWorker, prompt: list[int]) -> None:
    """Another prompt computes its prefix when it is looked up, and is cancelled."""
    world.send(worker, generate("first", [*prompt[:REMAINDER], 1]))
    worker.turn()
    world.send(worker, generate("long", prompt))
    worker.turn()
    assert ("w", "generation", "long") not in world.legs  # no room for it yet
    world.send(worker, Cancel(request_id="first"))


@pytest.mark.parametrize("lose", [lost_before_it_is_matched, not_computed_after_all])
def test_a_long_remainder_shows_late_and_short_prompts_keep_coming(
    lose: Callable[[SimWorld, SimWorker, list[int]], None],
) -> None:
    """The case of B35: it gives way for ``MAX_ITERS`` steps and to as many slots as it wants."""
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    rng = random.Random(4)
    prompt = random_prompt(rng, LONG)
    lose(world, worker, prompt)
    before, came = len(worker.executor.batches), 0
    long = ("w", "generation", "long")
    while not (long in world.legs and world.legs[long].ended):
        for _ in range(2):
            came += 1
            world.send(worker, generate(f"s{came}", random_prompt(rng, SHORT), max_tokens=1))
        worker.turn()
        if ("s1", 0) not in world.choices:
            assert long not in world.legs, "it took the slots of those whom it gives way to"
        assert len(worker.executor.batches) < before + 100
    steps = len(worker.executor.batches) - before
    world.drain()
    assert world.choices["s1", 0].finish == "length"
    assert world.choices["long", 0].tokens == expected(prompt)
    passing = LONG_SLOTS / (2 * SHORT_SLOTS)  # steps in which two short ones pass
    alone = LONG / BUDGET
    assert steps <= MAX_ITERS + passing + 2 * alone + 8


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3), st.integers(1, 12)), max_size=10),
    st.integers(0, 12),
)
def test_demotion_changes_the_order_and_nothing_else(
    parts: list[tuple[int, int, int]], available: int
) -> None:
    items = [queued(key, *part) for key, part in enumerate(parts)]
    limits = Limits(BUDGET, max_running=8, total=(12,), demotion=DEMOTION)
    plan = plan_admission(items, (available,), limits)
    assert sum(items[key].demand[0] for key in plan.admit) <= available
    demoted = [DEMOTION.applies(one.uncached, one.demoted) for one in items]
    order = [demoted[key] for key in plan.admit]
    assert order == sorted(order)
    for key in plan.demoted:
        assert demoted[key]
        assert any(not demoted[other] for other in range(key, len(items)))
