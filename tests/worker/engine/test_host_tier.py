"""Conversations that need three times the pools, with a host tier below them."""

from __future__ import annotations

import random

import pytest

from tests.support.sim_engines import (
    SimWorker,
    SimWorld,
    WorkerShape,
    expected,
    fake_plan,
    generate,
    prefill,
    random_prompt,
)

SHAPE = WorkerShape(slots=16, host_slots=48, max_sequence_tokens=60)
CONVERSATIONS = 8
"""Of about 24 tokens, six blocks each: three times the slots of a worker."""


def turns(world: SimWorld, ask: object, rounds: int = 4) -> None:
    """Several conversations take turns; each turn is what was said before and a word more."""
    assert callable(ask)
    rng = random.Random(7)
    said = [random_prompt(rng, 16) for _ in range(CONVERSATIONS)]
    for turn in range(rounds):
        for number, prompt in enumerate(said):
            name = f"{turn}.{number}"
            ask(name, prompt)
            world.drain()
            answer = world.choices[name, 0].tokens
            assert answer == expected(prompt, max_tokens=3), name
            said[number] = [*prompt, *answer, rng.randrange(5)]


def hit_rate(worker: SimWorker) -> float:
    counters = worker.manager.counters
    return counters.matched_tokens / counters.queried_tokens


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize("replicas", [0, 2])
def test_a_working_set_three_times_the_pool_is_not_computed_again(
    windows: tuple[int | None, ...], replicas: int
) -> None:
    rates = []
    for host_slots in (0, 80):
        world = SimWorld(plan=fake_plan(*windows))
        shape = WorkerShape(
            slots=16, host_slots=host_slots, max_sequence_tokens=60, replicas=replicas
        )
        worker = world.worker("w", shape)
        turns(
            world,
            lambda name, prompt, world=world, worker=worker: world.send(
                worker, generate(name, prompt, max_tokens=3)
            ),
        )
        rates.append(hit_rate(worker))
        assert (worker.manager.counters.host_matched_tokens > 0) == (host_slots > 0)
    assert rates[1] > 0.6 > rates[0]


def test_a_context_worker_ships_what_comes_back_from_the_host() -> None:
    world = SimWorld(seed=3)
    context, generation = world.worker("c", SHAPE), world.worker("g", SHAPE)

    def ask(name: str, prompt: list[int]) -> None:
        destination, source = generation.incarnation, context.address
        world.send(context, prefill(name, prompt, destination=destination, max_tokens=3))
        world.send(generation, generate(name, prompt, source=source, max_tokens=3))

    turns(world, ask)
    for worker in (context, generation):
        assert worker.gauges is not None
        assert 0 < worker.gauges.host_cached_tokens_total <= worker.gauges.cached_tokens_total
        assert worker.manager.counters.host_matched_tokens > 0
        assert worker.manager.counters.pages_onboarded > 0
    assert world.ended(context, "context", "3.0").prefill_tokens < 12


@pytest.mark.parametrize("seed", range(20))
def test_many_at_once_on_small_pools_finish(seed: int) -> None:
    rng = random.Random(seed)
    world = SimWorld(seed=seed, plan=fake_plan(None, 9) if seed % 2 else None)
    worker = world.worker("w", WorkerShape(slots=14, host_slots=rng.choice((3, 30))))
    prefixes = [random_prompt(rng, 14) for _ in range(4)]
    prompts: dict[str, list[int]] = {}
    for number in range(30):
        name = f"r{number}"
        prompts[name] = [*rng.choice(prefixes), *random_prompt(rng, rng.randint(1, 9))]
        world.send(worker, generate(name, prompts[name], max_tokens=rng.randint(1, 8)))
        for _ in range(rng.randint(0, 6)):
            world.step()
    world.drain()
    for name, prompt in prompts.items():
        tokens = world.choices[name, 0].tokens
        assert tokens == expected(prompt, max_tokens=len(tokens))


def test_what_the_cache_did_is_told_to_front_ends_and_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="worker.engine")
    world = SimWorld()
    worker = world.worker("w", SHAPE)
    turns(world, lambda name, prompt: world.send(worker, generate(name, prompt, max_tokens=3)))
    counters, gauges = worker.manager.counters, worker.gauges
    assert gauges is not None
    assert (
        gauges.evicted_pages_total,
        gauges.demoted_pages_total,
        gauges.onboarded_pages_total,
    ) == (
        counters.pages_evicted,
        counters.pages_demoted,
        counters.pages_onboarded,
    )
    assert counters.pages_demoted > 0
    # Counted once a leg: looks at the cache, and openings in vain, count for the manager alone.
    assert 0 < gauges.host_cached_tokens_total <= gauges.cached_tokens_total
    assert gauges.host_cached_tokens_total <= counters.host_matched_tokens
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all(line.startswith("kv cache: ") for line in lines)
    assert "sequences_opened=1" in lines[0]
