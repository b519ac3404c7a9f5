"""Two steps under way: a step is planned and launched before the results of the one before it are
seen. Everything is as with one, and no page is touched after it was given back.
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
from worker.messages import Cancel, Generate, SamplingParams, Stop

DEEP = WorkerShape(depth=2)


def alone(shape: WorkerShape = DEEP, *windows: int | None) -> tuple[SimWorld, SimWorker]:
    world = SimWorld(0, fake_plan(*windows))
    return world, world.worker("w", shape)


def with_sampling(message: Generate, **params: float) -> Generate:
    sampling = SamplingParams(temperature=0.0, seed=message.sampling.seed, **params)  # type: ignore[arg-type]
    return message.model_copy(update={"sampling": sampling})


def held(worker: SimWorker) -> int:
    return worker.shape.slots - worker.available


def test_a_decode_goes_on_before_its_token_is_seen() -> None:
    world, worker = alone()
    prompt = list(range(6))
    world.send(worker, generate("r", prompt, max_tokens=5))
    worker.turn()
    worker.turn()
    assert worker.executor.batches == [[(1, 0, 6)], [(1, 6, 1)]]
    assert worker.executor.fed_rows == 1
    assert world.choices["r", 0].tokens == expected(prompt)[:1]
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt, max_tokens=5)
    assert worker.executor.fed_rows == 4
    # The last token by length is foreseen: nothing is computed in vain.
    assert worker.executor.computed_tokens == 6 + 4


def test_the_chunks_of_a_prompt_follow_each_other() -> None:
    world, worker = alone(WorkerShape(depth=2, max_batch_tokens=8))
    prompt = random_prompt(random.Random(0), 30)
    world.send(worker, generate("r", prompt))
    for _ in range(3):
        worker.turn()
    assert worker.executor.batches == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 8)]]
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt)
    assert world.ended(worker, "generation", "r").prefill_tokens == 30


def test_a_stop_token_leaves_one_row_that_nobody_sees() -> None:
    prompt = list(range(7))
    stop = expected(prompt)[4]  # of index 4: its row fills position 11, the last of block 2
    assert stop not in expected(prompt)[:4]
    world, worker = alone()
    world.send(worker, generate("r", prompt, max_tokens=50, stop_ids=(stop,)))
    world.run_until(lambda: ("r", 0) in world.choices and world.choices["r", 0].finish)
    assert world.ended(worker, "generation", "r").outcome == "succeeded"
    assert worker.executor.batches[-1] == [(1, 11, 1)]
    # The row is under way: its page is nobody else's, and nothing of it is in the tree.
    assert held(worker) == 3
    world.drain()
    assert held(worker) == 0
    assert world.choices["r", 0].tokens == expected(prompt)[:5]
    decoded = worker.gauges.decode_tokens_total if worker.gauges else None
    assert decoded == 4
    again = [*prompt, *expected(prompt)[:5], 3, 4]
    world.send(worker, generate("again", again))
    world.drain()
    assert world.started(worker, "generation", "again").cached_tokens == 11
    assert world.choices["again", 0].tokens == expected(again)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_a_cancelled_sequence_keeps_its_pages_until_its_steps_are_over(turns: int) -> None:
    world, worker = alone(WorkerShape(depth=2, max_batch_tokens=8))
    prompt = random_prompt(random.Random(1), 12)
    world.send(worker, generate("r", prompt, max_tokens=50))
    for _ in range(turns):
        worker.turn()
    world.send(worker, Cancel(request_id="r"))
    worker.turn()
    assert world.ended(worker, "generation", "r").outcome == "cancelled"
    world.drain()
    assert held(worker) == 0
    # What was computed of the prompt until then is there for others.
    world.send(worker, generate("same", prompt))
    world.drain()
    cached = world.started(worker, "generation", "same").cached_tokens
    assert cached == (8 if turns == 1 else 11)
    assert world.choices["same", 0].tokens == expected(prompt)


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}],
    ids=lambda params: next(iter(params)),
)
def test_what_needs_the_token_on_the_host_makes_steps_wait(params: dict[str, float]) -> None:
    world, worker = alone()
    prompts = {"penalised": [1, 2, 3], "plain": [4, 5, 6, 7]}
    world.send(worker, with_sampling(generate("penalised", prompts["penalised"]), **params))
    world.send(worker, generate("plain", prompts["plain"], max_tokens=30))
    world.run_until(lambda: ("penalised", 0) in world.choices)
    while not world.choices["penalised", 0].finish:
        assert worker.executor.fed_rows == 0
        world.step()
    world.drain()
    assert worker.executor.fed_rows > 15  # as soon as it is gone
    for name, length in (("penalised", 8), ("plain", 30)):
        assert world.choices[name, 0].tokens == expected(prompts[name], max_tokens=length)


def test_log_probabilities_come_a_step_later_and_with_their_tokens() -> None:
    world, worker = alone()
    world.send(worker, generate("r", [1, 2, 3], logprobs=2))
    world.drain()
    assert worker.executor.fed_rows == 7
    heard = world.choices["r", 0]
    assert [round(-1 - one.logprob) for one in heard.logprobs] == list(range(8))
    assert [one.top[0][0] for one in heard.logprobs] == heard.tokens


def test_a_choice_that_is_stopped_while_first_tokens_are_drawn_gets_none() -> None:
    world, worker = alone()
    prompt = [5, 6, 7]
    world.send(worker, generate("r", prompt, n=3))
    worker.turn()
    world.send(worker, Stop(request_id="r", choice=1, index=0))
    world.drain()
    assert ("r", 1) not in world.choices
    for choice in (0, 2):
        assert world.choices["r", choice].tokens == expected(prompt, choice=choice)


def test_bad_logits_end_a_request_whose_next_row_is_under_way() -> None:
    world, worker = alone()
    prompt = [5, 6, 7]
    worker.executor.poison = {expected(prompt)[2]}
    assert expected(prompt)[2] not in (*prompt, *expected(prompt)[:2])
    world.send(worker, generate("r", prompt))
    world.send(worker, generate("other", [8, 9]))
    world.drain()
    assert world.ended(worker, "generation", "r").code == "bad_logits"
    assert world.choices["r", 0].tokens == expected(prompt)[:3]
    assert world.choices["other", 0].tokens == expected([8, 9])


def test_what_the_tree_has_already_stays_with_the_row_that_reads_it() -> None:
    """Two equal prompts give equal blocks, of which the tree keeps one."""
    world, worker = alone()
    prompt = [1, 2]  # too short to be waited for
    for name in ("a", "b"):
        world.send(worker, generate(name, prompt, max_tokens=30))
    world.drain()
    for name in ("a", "b"):
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=30)
    assert worker.manager.counters.pages_rebased >= 6


@pytest.mark.parametrize("windows", [(None,), (None, 6), (7, 11, None)])
def test_more_work_than_pages_gives_the_same_tokens(windows: tuple[int | None, ...]) -> None:
    output, rng = 30, random.Random(2)
    slots = -(-(8 + output) // BLOCK) * 3 // 2 * len(windows)
    world, worker = alone(WorkerShape(slots=slots, depth=2, replicas=1), *windows)
    prompts = {f"r{index}": random_prompt(rng, 8) for index in range(4)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, max_tokens=output, deadline_ms=10**9))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=output)
    assert worker.gauges is not None
    assert 1 <= worker.gauges.preemptions_total <= 6
    assert worker.executor.fed_rows > 50
