"""A context and a generation worker, and what may happen between them."""

from __future__ import annotations

import random
from collections.abc import Callable

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
from worker.inbox import PairsChanged
from worker.messages import Cancel, Stop, Warm


class Pair:
    """One worker of each role in one world."""

    def __init__(
        self,
        seed: int = 0,
        context: WorkerShape | None = None,
        generation: WorkerShape | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.world = SimWorld(seed, fake_plan(*windows))
        self.context = self.world.worker("context", context)
        self.generation = self.world.worker("generation", generation)

    def ask(
        self,
        name: str,
        prompt: list[int],
        *,
        n: int = 1,
        max_tokens: int = 8,
        stop_ids: tuple[int, ...] = (),
        logprobs: int | None = None,
        deadline_ms: int = 60_000,
    ) -> None:
        self.world.send(
            self.context,
            prefill(
                name,
                prompt,
                self.generation.incarnation,
                n=n,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                logprobs=logprobs,
                deadline_ms=deadline_ms,
            ),
        )
        self.world.send(
            self.generation,
            generate(
                name,
                prompt,
                source=self.context.address,
                n=n,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                logprobs=logprobs,
                deadline_ms=deadline_ms,
            ),
        )

    def cancel(self, name: str) -> None:
        self.world.send(self.context, Cancel(request_id=name))
        self.world.send(self.generation, Cancel(request_id=name))

    def outcomes(self, name: str) -> tuple[str, str]:
        return (
            self.world.ended(self.context, "context", name).outcome,
            self.world.ended(self.generation, "generation", name).outcome,
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 45])
def test_a_pair_gives_what_one_worker_gives(length: int, seed: int) -> None:
    pair = Pair(seed)
    prompt = random_prompt(random.Random(length), length)
    pair.ask("r", prompt, logprobs=1)
    pair.world.drain()
    choice = pair.world.choices["r", 0]
    assert choice.tokens == expected(prompt)
    assert len(choice.logprobs) == len(choice.tokens)
    assert choice.finish == "length"
    assert pair.outcomes("r") == ("succeeded", "succeeded")
    received = pair.world.ended(pair.generation, "generation", "r")
    assert received.prefill_tokens == 0
    assert received.transferred_bytes > 0
    assert pair.world.ended(pair.context, "context", "r").prefill_tokens == length


def test_the_first_token_comes_from_the_context_worker_before_the_pages_are_there() -> None:
    pair = Pair()
    pair.world.network.max_delay_ms = 500
    pair.ask("r", list(range(30)))
    pair.world.run_until(lambda: ("r", 0) in pair.world.choices)
    assert pair.world.choices["r", 0].sources == ["context"]
    pair.world.drain()
    assert set(pair.world.choices["r", 0].sources[1:]) == {"generation"}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_exactly_max_tokens(max_tokens: int) -> None:
    pair = Pair()
    prompt = list(range(13))
    pair.ask("r", prompt, max_tokens=max_tokens)
    pair.world.drain()
    assert pair.world.choices["r", 0].tokens == expected(prompt, max_tokens=max_tokens)
    assert len(pair.world.choices["r", 0].tokens) == max_tokens
    assert pair.outcomes("r") == ("succeeded", "succeeded")
    assert (pair.generation.executor.batches == []) == (max_tokens == 1)


def test_a_first_token_that_stops_is_the_last() -> None:
    pair = Pair()
    prompt = list(range(20))
    stop = expected(prompt)[0]
    pair.ask("r", prompt, stop_ids=(stop,))
    pair.world.drain()
    assert pair.world.choices["r", 0].tokens == [stop]
    assert pair.world.choices["r", 0].finish == "stop"
    assert pair.generation.executor.batches == []


def test_a_request_of_one_token_needs_no_generation_leg() -> None:
    pair = Pair()
    prompt = list(range(20))
    pair.world.send(pair.context, prefill("r", prompt, None, max_tokens=1))
    pair.world.drain()
    assert pair.world.choices["r", 0].tokens == expected(prompt, max_tokens=1)
    assert pair.world.ended(pair.context, "context", "r").outcome == "succeeded"


def test_several_choices_share_one_prefill_and_one_transfer() -> None:
    pair = Pair()
    prompt = random_prompt(random.Random(1), 22)
    stop = expected(prompt, choice=1)[0]
    pair.ask("r", prompt, n=3, max_tokens=9, stop_ids=(stop,), logprobs=0)
    pair.world.drain()
    for choice in range(3):
        heard = pair.world.choices["r", choice]
        assert heard.tokens == expected(prompt, choice=choice, max_tokens=9, stop_ids=(stop,))
        assert len(heard.logprobs) == len(heard.tokens)
    assert pair.world.choices["r", 1].tokens == [stop]
    assert pair.context.executor.computed_tokens == len(prompt)
    assert pair.world.network.moved_slots == -(-len(prompt) // BLOCK)


def test_only_missing_blocks_travel() -> None:
    pair = Pair()
    prompt = random_prompt(random.Random(1), 10 * BLOCK)
    pair.ask("a", prompt)
    pair.world.drain()
    moved = pair.world.network.moved_slots
    longer = [*prompt, 1, 2, 3]
    pair.ask("b", longer)
    pair.world.drain()
    assert pair.world.network.moved_slots - moved == 1
    assert pair.world.started(pair.context, "context", "b").cached_tokens == len(prompt)
    assert pair.world.started(pair.generation, "generation", "b").cached_tokens == len(prompt)
    assert pair.world.choices["b", 0].tokens == expected(longer)


def test_a_prompt_that_is_wholly_there_moves_nothing() -> None:
    pair = Pair()
    prompt = random_prompt(random.Random(1), 4 * BLOCK)
    for name in ("a", "b"):
        pair.ask(name, prompt)
        pair.world.drain()
    assert pair.world.network.moved_slots == 4
    assert pair.world.choices["b", 0].tokens == expected(prompt)


def test_pages_of_a_finished_chunk_travel_while_the_next_one_computes() -> None:
    pair = Pair(context=WorkerShape(max_batch_tokens=2 * BLOCK))
    pair.world.network.max_delay_ms = 0
    prompt = list(range(60))
    pair.ask("r", prompt)
    pair.world.run_until(lambda: pair.world.network.moved_slots >= 2)
    assert pair.context.executor.computed_tokens < len(prompt)
    pair.world.drain()


def test_nothing_is_computed_before_the_grant() -> None:
    pair = Pair(generation=WorkerShape(slots=12))
    pair.ask("big", random_prompt(random.Random(1), 40), max_tokens=5)
    pair.world.run_until(lambda: pair.generation.executor.batches)
    pair.ask("next", random_prompt(random.Random(2), 40))
    for _ in range(5):
        pair.world.step()
    assert pair.context.executor.computed_tokens == 40
    pair.world.drain()
    assert pair.outcomes("next") == ("succeeded", "succeeded")


STAGES: dict[str, Callable[[Pair], bool]] = {
    "at once": lambda pair: True,
    "granted": lambda pair: pair.world.network.next_ms() is not None,
    "computing": lambda pair: pair.context.executor.computed_tokens > 0,
    "moving": lambda pair: pair.world.network.moved_slots > 0,
    "first token": lambda pair: ("r", 0) in pair.world.choices,
    "decoding": lambda pair: bool(pair.generation.executor.batches),
    "over": lambda pair: (
        pair.world.choices["r", 0].finish is not None if ("r", 0) in pair.world.choices else False
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stage", STAGES)
def test_cancel_at_every_stage_brings_every_page_home(stage: str, seed: int) -> None:
    pair = Pair(seed, context=WorkerShape(max_batch_tokens=8))
    prompt = random_prompt(random.Random(seed), 50)
    pair.ask("r", prompt)
    pair.world.run_until(lambda: STAGES[stage](pair))
    pair.cancel("r")
    pair.world.drain()
    # The same pages serve the next request at once.
    other = random_prompt(random.Random(seed + 100), 50)
    pair.ask("s", other)
    pair.world.drain()
    assert pair.world.choices["s", 0].tokens == expected(other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "at once"])
@pytest.mark.parametrize("victim", ["context", "generation"])
def test_the_death_of_a_worker_ends_the_other_leg_and_loses_no_page(
    victim: str, stage: str, seed: int
) -> None:
    pair = Pair(seed, context=WorkerShape(max_batch_tokens=8))
    prompt = random_prompt(random.Random(seed), 50)
    pair.ask("r", prompt)
    pair.world.run_until(lambda: STAGES[stage](pair))
    dead: SimWorker = pair.context if victim == "context" else pair.generation
    pair.world.network.kill(dead)
    pair.world.drain()
    survivor = pair.generation if victim == "context" else pair.context
    kind = "generation" if victim == "context" else "context"
    ended = pair.world.ended(survivor, kind, "r")  # type: ignore[arg-type]
    if ended.outcome != "succeeded":
        # A context leg that no grant reached can only wait for its deadline.
        assert ended.retryable or ended.code == "deadline"
        heard = pair.world.choices.get(("r", 0))
        emitted = list(heard.tokens) if heard is not None else []
        pair.world.legs.clear()
        pair.world.accepted.clear()
        pair.world.send(survivor, generate("r", prompt, emitted=[emitted]))
        pair.world.drain()
        assert pair.world.choices["r", 0].tokens == expected(prompt)


def test_cancel_that_overtakes_the_request() -> None:
    pair = Pair()
    pair.cancel("r")
    pair.ask("r", list(range(20)))
    pair.world.drain()
    assert pair.outcomes("r") == ("cancelled", "cancelled")
    assert pair.context.executor.batches == []


def test_a_grant_that_comes_before_the_request_is_remembered() -> None:
    pair = Pair()
    prompt = list(range(20))
    pair.world.send(pair.generation, generate("r", prompt, source=pair.context.address))
    for _ in range(50):
        pair.world.network.run_due()
        pair.generation.turn()
        pair.context.turn()
        pair.world.clock.now += 1
    pair.world.send(pair.context, prefill("r", prompt, pair.generation.incarnation))
    pair.world.drain()
    assert pair.world.choices["r", 0].tokens == expected(prompt)


def test_a_grant_without_a_request_is_given_back_in_time() -> None:
    pair = Pair()
    message = generate("r", list(range(20)), source=pair.context.address, deadline_ms=500_000)
    pair.world.send(pair.generation, message)
    start = pair.world.clock.now
    pair.world.drain()
    ended = pair.world.ended(pair.generation, "generation", "r")
    assert (ended.outcome, ended.retryable) == ("failed", True)
    assert pair.world.legs["generation", "generation", "r"].ended_ms - start < 100_000


def test_a_request_without_a_grant_ends_at_its_deadline() -> None:
    pair = Pair()
    message = prefill("r", list(range(20)), pair.generation.incarnation, deadline_ms=900)
    pair.world.send(pair.context, message)
    pair.world.drain()
    assert pair.world.ended(pair.context, "context", "r").code == "deadline"


def test_stop_before_the_pages_are_there() -> None:
    pair = Pair()
    pair.ask("r", list(range(40)))
    pair.world.run_until(lambda: ("r", 0) in pair.world.choices)
    pair.world.send(pair.generation, Stop(request_id="r", choice=0, index=1))
    pair.world.drain()
    assert pair.world.choices["r", 0].tokens == expected(list(range(40)))[:1]
    assert pair.world.ended(pair.generation, "generation", "r").outcome == "succeeded"


@pytest.mark.parametrize(
    ("seed", "windows"), [(0, (None,)), (0, (None, 6)), (1, (None, 6)), (2, (None, 6))]
)
def test_pools_of_two_prompts_serve_fifty_requests(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    slots = 2 * 12 * len(windows)
    shape = WorkerShape(slots=slots, max_sequence_tokens=48)
    pair = Pair(seed, context=shape, generation=shape, windows=windows)
    rng = random.Random(seed)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(30, 40)) for i in range(50)}
    for name, prompt in prompts.items():
        pair.ask(name, prompt, max_tokens=6, deadline_ms=10**8)
    pair.world.drain()
    for name, prompt in prompts.items():
        assert pair.outcomes(name) == ("succeeded", "succeeded")
        assert pair.world.choices[name, 0].tokens == expected(prompt, max_tokens=6)
    assert pair.context.gauges is not None
    assert pair.context.gauges.preemptions_total == 0
    assert pair.generation.gauges is not None
    assert pair.generation.gauges.preemptions_total == 0
    assert pair.generation.gauges.prefill_tokens_total == 0


def test_the_context_pool_may_be_smaller_than_the_queue_it_serves() -> None:
    pair = Pair(context=WorkerShape(slots=11), generation=WorkerShape(slots=60))
    rng = random.Random(8)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(1, 40)) for i in range(50)}
    for name, prompt in prompts.items():
        pair.ask(name, prompt, deadline_ms=10**8)
    pair.world.drain()
    for name, prompt in prompts.items():
        assert pair.world.choices[name, 0].tokens == expected(prompt)


def test_requests_that_share_a_long_prefix_run_beside_each_other() -> None:
    shape = WorkerShape(slots=14, max_sequence_tokens=56)
    pair = Pair(generation=shape)
    common = random_prompt(random.Random(1), 10 * BLOCK)
    pair.ask("warm", common, max_tokens=2)
    pair.world.drain()
    for index in range(3):
        pair.ask(f"r{index}", [*common, index], max_tokens=7)
    pair.world.drain()
    for index in range(3):
        assert pair.world.choices[f"r{index}", 0].tokens == expected([*common, index], max_tokens=7)
    assert max(len(batch) for batch in pair.generation.executor.batches) >= 2


def test_pairs_are_warmed_as_the_front_end_says_and_an_idle_engine_tells_of_them() -> None:
    pair = Pair()
    pair.world.send(pair.generation, Warm(peers=(pair.context.address,)))
    pair.world.drain()
    assert pair.generation.transfers.warm == (pair.context.address,)
    gauges = pair.generation.gauges
    assert gauges is not None
    assert [(told.side, told.peer) for told in gauges.pairs] == [
        ("generation", pair.context.incarnation)
    ]
    pair.generation.transfers.warm = ()
    pair.generation.inbox.append(PairsChanged())
    pair.generation.turn()
    assert pair.generation.gauges is not None
    assert pair.generation.gauges.pairs == ()
