"""Every request ends exactly once, with the right tokens and nothing left over, whatever happens
and in which order.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from services.orchestration.api import ChoiceFinished, Completed, Failed, TokenDelta
from services.orchestration.flow_states import (
    Begin,
    CancelRequested,
    DeadlinePassed,
    StopRequested,
)
from tests.sim.flow_requests import SimRequest
from tests.sim.flow_world import ATTEMPT, SimFaults, SimOutcome, SimWorker, SimWorld

REQUESTS = 12


def build_requests(rng: random.Random) -> list[tuple[float, SimRequest]]:
    requests = []
    for number in range(REQUESTS):
        seed = rng.randrange(1000)
        n = rng.choice((1, 1, 1, 2, 4))
        plain = SimRequest("", n, 50, frozenset(), seed, 0.0)
        stops = set()
        for choice in range(n):
            if rng.random() < 0.3:
                stops.add(plain.token(choice, rng.choice((0, 0, 1, 3))))
        start = rng.random() * 0.5
        requests.append(
            (
                start,
                SimRequest(
                    request_id=f"r{number}",
                    n=n,
                    max_tokens=rng.choice((1, 2, 3, 8, 20)),
                    stop_tokens=frozenset(stops),
                    seed=seed,
                    deadline=start + rng.choice((0.05, 0.3, 30.0, 30.0)),
                    cancel_at=start + rng.random() * 0.5 if rng.random() < 0.2 else None,
                    stop_choice_at=(
                        (start + rng.random() * 0.3, rng.randrange(n))
                        if rng.random() < 0.2
                        else None
                    ),
                ),
            )
        )
    return requests


def schedule(world: SimWorld, start: float, request: SimRequest) -> None:
    name = request.request_id

    def begin() -> None:
        world.submit(request)
        world.feed(name, Begin())

    def stop() -> None:
        assert request.stop_choice_at is not None
        outcome = world.outcomes.get(name)
        if outcome is None:
            return
        choice = request.stop_choice_at[1]
        count = len(tokens_of(outcome, choice))
        world.feed(name, StopRequested(choice, world.rng.randint(0, count)))

    world.clock.at(start, begin)
    world.clock.at(request.deadline, lambda: world.feed(name, DeadlinePassed()))
    if request.cancel_at is not None:
        world.clock.at(request.cancel_at, lambda: world.feed(name, CancelRequested()))
    if request.stop_choice_at is not None:
        world.clock.at(request.stop_choice_at[0], stop)


def tokens_of(outcome: SimOutcome, choice: int) -> list[int]:
    tokens: list[int] = []
    for event in outcome.events:
        if isinstance(event, TokenDelta) and event.choice == choice:
            assert event.index == len(tokens), "a gap or a repetition"
            tokens.extend(event.tokens)
    return tokens


def check_outcome(outcome: SimOutcome) -> None:
    request = outcome.request
    terminal = [e for e in outcome.events if isinstance(e, (Completed, Failed))]
    assert len(terminal) == 1, f"{request}: {len(terminal)} terminal events"
    assert outcome.events[-1] is terminal[0]
    assert outcome.conflicts == 0
    assert outcome.forgotten
    for choice in range(request.n):
        tokens = tokens_of(outcome, choice)
        attempts = [token // ATTEMPT for token in tokens]
        assert attempts == sorted(attempts), "an earlier attempt spoke after a later one"
        assert max(attempts, default=0) <= outcome.repairs
        plain = [token % ATTEMPT for token in tokens]
        expected = request.expected(choice)
        assert plain == expected[: len(plain)]
        finishes = [
            e for e in outcome.events if isinstance(e, ChoiceFinished) and e.choice == choice
        ]
        assert len(finishes) <= 1
        if isinstance(terminal[0], Completed):
            assert len(finishes) == 1
            stopped = request.stop_choice_at is not None and request.stop_choice_at[1] == choice
            assert stopped or plain == expected
            assert terminal[0].completion_tokens[choice] <= len(plain)
            assert stopped or terminal[0].completion_tokens[choice] == len(plain)
            assert terminal[0].repaired == (outcome.repairs > 0)
    if isinstance(terminal[0], Failed):
        allowed = {"cancelled", "deadline_exceeded", "no_worker", "repair_failed", "simulated"}
        assert terminal[0].code in allowed


def check_world(world: SimWorld) -> None:
    assert world.idle
    for outcome in world.outcomes.values():
        check_outcome(outcome)
    world.router.check()
    assert len(world.router.ledger) == 0
    for worker in world.workers.values():
        if worker.alive:
            assert not worker.legs, "a leg was neither ended nor cancelled"


@pytest.mark.parametrize("block", range(10))
def test_random_worlds(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        rng = random.Random(seed)
        instances = [f"context-{i}" for i in range(rng.choice((1, 2)))]
        instances += [f"generation-{i}" for i in range(rng.choice((1, 2)))]
        faults = SimFaults(
            delay=rng.choice((0.01, 0.1)),
            duplicate_rate=rng.choice((0.0, 0.3)),
            fail_rate=rng.choice((0.0, 0.1, 0.3)),
            reject_rate=rng.choice((0.0, 0.05)),
            death_at=[
                (rng.random(), rng.choice(instances)) for _ in range(rng.choice((0, 1, 3, 6)))
            ],
            revival_after=rng.choice((None, 0.3)),
        )
        world = SimWorld(seed, faults)
        for instance in instances:
            role = "context" if instance.startswith("context") else "generation"
            world.add_worker(instance, role)  # type: ignore[arg-type]
        for when, instance in faults.death_at:
            world.clock.at(when, partial(world.kill, instance))
        for start, request in build_requests(rng):
            schedule(world, start, request)
        try:
            world.clock.run()
            check_world(world)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("victim", ["context-0", "generation-0"])
def test_a_death_at_any_moment_is_repaired_when_the_worker_comes_back(victim: str) -> None:
    """One request, one death: swept over the whole life of the request."""
    for step in range(120):
        faults = SimFaults(delay=0.05, fail_rate=0.0, reject_rate=0.0, revival_after=0.2)
        world = SimWorld(step, faults)
        world.add_worker("context-0", "context")
        world.add_worker("generation-0", "generation")
        request = SimRequest("r0", 2, 12, frozenset(), step, deadline=30.0)
        schedule(world, 0.0, request)
        world.clock.at(step * 0.005, partial(world.kill, victim))
        world.clock.run()
        check_world(world)
        assert isinstance(world.outcomes["r0"].events[-1], Completed), f"step {step}"


def test_without_faults_nothing_is_repaired() -> None:
    for seed in range(30):
        world = SimWorld(seed, SimFaults(fail_rate=0.0, reject_rate=0.0))
        world.add_worker("context-0", "context")
        world.add_worker("generation-0", "generation")
        for number in range(6):
            request = SimRequest(f"r{number}", 1 + number % 3, 9, frozenset(), seed + number, 60.0)
            schedule(world, number * 0.02, request)
        world.clock.run()
        check_world(world)
        assert all(outcome.repairs == 0 for outcome in world.outcomes.values())
        for outcome in world.outcomes.values():
            completed = outcome.events[-1]
            assert isinstance(completed, Completed)
            assert completed.cached_tokens == SimWorker.CONTEXT_CACHED
            assert completed.transferred_bytes == 7
