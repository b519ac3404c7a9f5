"""Context workers that fetch prefixes from other workers' caches, and what may happen meanwhile."""

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
    prefill,
    random_prompt,
)
from worker.messages import Cancel, PrefixSource, WorkerGauges

TURN = 37


class Cluster:
    """Two context workers and a generation worker; a first turn has run on context A."""

    def __init__(
        self,
        seed: int = 0,
        windows: tuple[int | None, ...] = (None,),
        **shapes: WorkerShape,
    ) -> None:
        self.world = SimWorld(seed, fake_plan(*windows))
        self.a = self.world.worker("a", shapes.get("a"))
        self.b = self.world.worker("b", shapes.get("b"))
        self.generation = self.world.worker("generation", shapes.get("generation"))
        self.first = random_prompt(random.Random(seed), TURN)
        self.ask("first", self.first, self.a)
        self.world.drain()
        answer = self.world.choices["first", 0].tokens
        self.second = self.first + answer + random_prompt(random.Random(seed + 1), 9)

    def ask(
        self,
        name: str,
        prompt: list[int],
        context: SimWorker,
        source: SimWorker | None = None,
        deadline_ms: int = 60_000,
    ) -> None:
        hint = None if source is None else PrefixSource(peer=source.address, tokens=len(prompt))
        self.world.send(
            context,
            prefill(
                name,
                prompt,
                self.generation.incarnation,
                prefix_source=hint,
                deadline_ms=deadline_ms,
            ),
        )
        self.world.send(
            self.generation,
            generate(name, prompt, source=context.address, deadline_ms=deadline_ms),
        )

    def judge(self, name: str, prompt: list[int]) -> None:
        """The answer is right, and everything came home."""
        self.world.drain()
        assert self.world.choices[name, 0].tokens == expected(prompt)
        assert self.world.ended(self.b, "context", name).outcome == "succeeded"


def gauges(worker: SimWorker) -> WorkerGauges:
    assert worker.gauges is not None
    return worker.gauges


def counts(worker: SimWorker) -> tuple[int, int, int]:
    """Pulls that succeeded, were declined, failed."""
    now = gauges(worker)
    return now.pulls_succeeded_total, now.pulls_declined_total, now.pulls_failed_total


@pytest.mark.parametrize("windows", [(None,), (None, 6), (7, 11, None)])
@pytest.mark.parametrize("seed", range(3))
def test_the_prompt_comes_from_the_context_worker_that_computed_it(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    cluster = Cluster(seed, windows)
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    cluster.judge("second", cluster.second)
    pulled = TURN // BLOCK * BLOCK
    assert counts(cluster.b) == (1, 0, 0)
    assert gauges(cluster.b).pulled_tokens_total == pulled
    assert gauges(cluster.a).pulls_served_total == 1
    assert cluster.world.started(cluster.b, "context", "second").cached_tokens == pulled
    computed = cluster.world.ended(cluster.b, "context", "second").prefill_tokens
    assert computed == len(cluster.second) - pulled


def test_generated_kv_returns_to_a_context_worker() -> None:
    cluster = Cluster()
    cluster.ask("second", cluster.second, cluster.b, cluster.generation)
    cluster.judge("second", cluster.second)
    # The last token of the answer was drawn and never computed.
    pulled = (TURN + 8 - 1) // BLOCK * BLOCK
    assert pulled > TURN
    assert counts(cluster.b) == (1, 0, 0)
    assert cluster.world.started(cluster.b, "context", "second").cached_tokens == pulled


def test_only_what_is_lacking_travels() -> None:
    cluster = Cluster()
    cluster.ask("again", cluster.first, cluster.a, cluster.generation)
    cluster.world.drain()
    before = cluster.world.network.moved_slots
    # A has the prompt of the first turn; it lacks what was generated.
    cluster.ask("second", cluster.second, cluster.a, cluster.generation)
    cluster.world.drain()
    assert cluster.world.choices["second", 0].tokens == expected(cluster.second)
    assert gauges(cluster.a).pulled_tokens_total == (TURN + 8 - 1) // BLOCK * BLOCK - 36
    assert counts(cluster.a) == (1, 0, 0)
    sent = cluster.world.network.moved_slots - before
    lacking_there = -(-len(cluster.second) // BLOCK) - (TURN + 7) // BLOCK
    assert sent == 2 + lacking_there


def test_a_pull_that_saves_too_little_is_not_begun() -> None:
    cluster = Cluster()
    cluster.ask("again", cluster.first, cluster.b)
    cluster.world.drain()
    moved = cluster.world.network.moved_slots
    cluster.ask("more", cluster.first, cluster.b, cluster.a)
    cluster.judge("more", cluster.first)
    assert counts(cluster.b) == (0, 0, 0)
    assert gauges(cluster.a).pulls_served_total == 0
    assert cluster.world.network.moved_slots == moved  # the generation worker holds all of it


def test_nothing_found_ends_at_once_and_the_prompt_is_computed() -> None:
    cluster = Cluster()
    fresh = random_prompt(random.Random(99), 30)
    cluster.ask("fresh", fresh, cluster.b, cluster.a)
    cluster.judge("fresh", fresh)
    assert counts(cluster.b) == (0, 1, 0)
    assert cluster.world.ended(cluster.b, "context", "fresh").prefill_tokens == 30


def test_a_source_declines_more_pulls_than_it_serves_at_once() -> None:
    cluster = Cluster(a=WorkerShape(most_served_pulls=1), b=WorkerShape(slots=200))
    cluster.world.network.max_delay_ms = 200
    prompts = [cluster.first[:length] for length in (29, 33, 37)]
    for number, prompt in enumerate(prompts):
        cluster.ask(f"r{number}", prompt, cluster.b, cluster.a)
    for number, prompt in enumerate(prompts):
        cluster.judge(f"r{number}", prompt)
    succeeded, declined, failed = counts(cluster.b)
    assert (succeeded, failed) == (1, 0)
    assert declined == 2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("who", ["a", "link"])
def test_a_source_that_is_lost_costs_nothing_but_time(seed: int, who: str) -> None:
    cluster = Cluster(seed)
    world = cluster.world
    world.network.max_delay_ms = 50
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    world.run_until(lambda: gauges(cluster.b).transfers_in_flight == 2)
    for _ in range(seed):
        world.step()
    if who == "a":
        world.network.kill(cluster.a)
    else:
        world.network.cut(cluster.a, cluster.b)
        for _ in range(20):
            world.step()
        world.network.certify(cluster.a)
    cluster.judge("second", cluster.second)
    assert sum(counts(cluster.b)) == 1


def test_a_page_in_doubt_is_kept_while_the_prompt_is_computed() -> None:
    cluster = Cluster()
    world = cluster.world
    world.network.max_delay_ms = 400
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    receives = world.network.receives
    world.run_until(lambda: any(receives.values()) or any(world.network.sends.values()))
    world.network.cut(cluster.a, cluster.b)
    world.run_until(lambda: gauges(cluster.b).quarantined_blocks > 0)
    world.run_until(lambda: ("b", "context", "second") in world.legs)
    world.run_until(lambda: bool(world.legs["b", "context", "second"].ended))
    assert gauges(cluster.b).quarantined_blocks > 0
    world.network.certify(cluster.a)
    cluster.judge("second", cluster.second)


def test_a_source_that_never_answers_is_given_up_at_the_pulls_deadline() -> None:
    cluster = Cluster()
    cluster.a.paused = True
    asked = cluster.world.clock.now
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    cluster.world.run_until(lambda: bool(cluster.world.choices.get(("second", 0))))
    assert 10_000 <= cluster.world.clock.now - asked < 12_000
    cluster.a.paused = False
    cluster.judge("second", cluster.second)
    assert counts(cluster.b) == (0, 0, 1)


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_cancelling_a_request_ends_its_pull(steps: int) -> None:
    cluster = Cluster(steps)
    cluster.world.network.max_delay_ms = 30
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    for _ in range(steps):
        cluster.world.step()
    for worker in (cluster.b, cluster.generation):
        cluster.world.send(worker, Cancel(request_id="second"))
    cluster.world.drain()
    fresh = random_prompt(random.Random(steps), 30)
    cluster.ask("fresh", fresh, cluster.b)
    cluster.judge("fresh", fresh)


def test_pages_found_cannot_be_evicted_before_they_were_sent() -> None:
    """Other prompts want every page of the source while it ships a prefix slowly."""
    cluster = Cluster(a=WorkerShape(slots=14))
    world = cluster.world
    world.network.max_delay_ms = 300
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    world.run_until(lambda: cluster.a.manager.leased_blocks() > 0)
    other = random_prompt(random.Random(5), 30)
    world.send(cluster.a, generate("other", other))
    cluster.judge("second", cluster.second)
    assert world.choices["other", 0].tokens == expected(other)
    assert counts(cluster.b) == (1, 0, 0)


def test_a_full_puller_lands_the_prefix_when_there_is_room() -> None:
    cluster = Cluster(b=WorkerShape(slots=16))
    world = cluster.world
    for number in range(4):
        prompt = random_prompt(random.Random(number), 40)
        world.send(cluster.b, generate(f"busy{number}", prompt, max_tokens=20))
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    cluster.judge("second", cluster.second)
    assert sum(counts(cluster.b)) == 1


def test_a_prefix_on_the_host_comes_back_to_be_served() -> None:
    cluster = Cluster(a=WorkerShape(slots=14, host_slots=40))
    world = cluster.world
    other = random_prompt(random.Random(5), 45)
    world.send(cluster.a, generate("other", other))
    world.drain()
    assert gauges(cluster.a).demoted_pages_total > 0
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    cluster.judge("second", cluster.second)
    assert counts(cluster.b) == (1, 0, 0)
    assert gauges(cluster.a).onboarded_pages_total > 0


def test_replicas_of_both_ends_keep_the_same_tables() -> None:
    shape = WorkerShape(replicas=1)
    cluster = Cluster(a=shape, b=shape)
    cluster.ask("second", cluster.second, cluster.b, cluster.a)
    cluster.judge("second", cluster.second)
    assert counts(cluster.b) == (1, 0, 0)


def asked(cluster: Cluster, name: str, prompt: list[int]) -> None:
    """B has asked A, which does not answer."""
    cluster.a.paused = True
    cluster.ask(name, prompt, cluster.b, cluster.a)
    cluster.world.run_until(lambda: gauges(cluster.b).transfers_in_flight == 2)


def test_a_prefix_that_was_computed_here_meanwhile_is_not_fetched() -> None:
    cluster = Cluster()
    asked(cluster, "second", cluster.second)
    cluster.ask("same", cluster.second, cluster.b)
    cluster.world.run_until(lambda: ("same", 0) in cluster.world.choices)
    cluster.a.paused = False
    cluster.judge("second", cluster.second)
    assert counts(cluster.b) == (0, 0, 0)
    assert gauges(cluster.a).pulls_served_total == 0
    started = cluster.world.started(cluster.b, "context", "second")
    assert started.cached_tokens == len(cluster.second) - 1


def test_a_place_of_the_source_is_free_again_after_each_pull() -> None:
    cluster = Cluster(a=WorkerShape(most_served_pulls=1))
    for number in range(1, 4):
        prompt = cluster.second[: 13 * number]
        cluster.ask(f"r{number}", prompt, cluster.b, cluster.a)
        cluster.judge(f"r{number}", prompt)
    assert counts(cluster.b) == (3, 0, 0)


def test_a_cancelled_request_withdraws_its_question() -> None:
    cluster = Cluster()
    asked(cluster, "second", cluster.second)
    cancelled_ms = cluster.world.clock.now
    for worker in (cluster.b, cluster.generation):
        cluster.world.send(worker, Cancel(request_id="second"))
    cluster.world.run_until(lambda: gauges(cluster.b).transfers_in_flight == 0)
    assert cluster.world.clock.now - cancelled_ms < 1_000
    cluster.a.paused = False
    cluster.world.drain()
    assert gauges(cluster.a).pulls_served_total == 0


def test_room_is_set_aside_from_the_question_on() -> None:
    cluster = Cluster(b=WorkerShape(slots=16))
    asked(cluster, "second", cluster.second)
    other = random_prompt(random.Random(5), 12)
    cluster.world.send(cluster.b, generate("other", other))
    cluster.world.run_until(lambda: gauges(cluster.b).waiting == 2)
    assert gauges(cluster.b).free_blocks == 16  # it is only set aside
    asked_ms = cluster.world.clock.now
    cluster.world.run_until(lambda: ("other", 0) in cluster.world.choices)
    assert cluster.world.clock.now - asked_ms > 9_000  # the pull was given up
    cluster.a.paused = False
    cluster.judge("second", cluster.second)
    assert cluster.world.choices["other", 0].tokens == expected(other)
    assert counts(cluster.b) == (0, 0, 1)
