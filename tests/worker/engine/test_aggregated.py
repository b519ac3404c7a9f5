"""One worker that does everything itself."""

from __future__ import annotations

import random

import pytest

from tests.support.sim_engines import (
    BLOCK,
    VOCAB,
    Choice,
    SimWorld,
    WorkerShape,
    expected,
    fake_plan,
    generate,
    prefill,
    random_prompt,
)
from worker.messages import Cancel, Stop


def test_one_request_gives_its_tokens_and_ends_once() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = list(range(10))
    world.send(worker, generate("r", prompt))
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt)
    assert world.choices["r", 0].finish == "length"
    ended = world.ended(worker, "generation", "r")
    assert (ended.outcome, ended.prefill_tokens) == ("succeeded", 10)
    assert world.started(worker, "generation", "r").cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 40])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_output_has_exactly_max_tokens(length: int, max_tokens: int) -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = random_prompt(random.Random(length), length)
    world.send(worker, generate("r", prompt, max_tokens=max_tokens))
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt, max_tokens=max_tokens)
    assert len(world.choices["r", 0].tokens) == max_tokens


def test_a_second_turn_finds_the_first_in_the_cache() -> None:
    world = SimWorld()
    worker = world.worker("w")
    first = random_prompt(random.Random(1), 21)
    world.send(worker, generate("a", first, max_tokens=6))
    world.drain()
    second = [*first, *world.choices["a", 0].tokens, 5, 6, 7]
    world.send(worker, generate("b", second))
    world.drain()
    # The last token drawn was never computed, so it is not in the cache.
    assert world.started(worker, "generation", "b").cached_tokens == len(first) + 5
    assert world.ended(worker, "generation", "b").prefill_tokens == len(second) - len(first) - 5
    assert world.choices["b", 0].tokens == expected(second)


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = random_prompt(random.Random(1), 12)
    for name in ("a", "b"):
        world.send(worker, generate(name, prompt))
        world.drain()
    assert world.ended(worker, "generation", "b").prefill_tokens == 1
    assert world.choices["b", 0].tokens == expected(prompt)


def test_a_stop_token_is_the_last_token_sent() -> None:
    prompt = list(range(7))
    stop = expected(prompt)[3]
    assert stop not in expected(prompt)[:3]
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("r", prompt, stop_ids=(stop,)))
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt)[:4]
    assert world.choices["r", 0].finish == "stop"


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    prompt = list(range(7))
    stop = expected(prompt)[1]
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("r", prompt, stop_ids=(stop,), min_tokens=5))
    world.drain()
    tokens = world.choices["r", 0].tokens
    assert tokens == expected(prompt, stop_ids=(stop,), min_tokens=5)
    assert len(tokens) >= 5
    assert stop not in tokens[:5]


def test_several_choices_come_from_one_prefill() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = random_prompt(random.Random(3), 22)
    world.send(worker, generate("r", prompt, n=3, max_tokens=7, logprobs=2))
    world.drain()
    for choice in range(3):
        heard = world.choices["r", choice]
        assert heard.tokens == expected(prompt, choice=choice, max_tokens=7)
        assert len(heard.logprobs) == 7
        assert all(len(logprob.top) == 2 for logprob in heard.logprobs)
    assert len({tuple(world.choices["r", choice].tokens) for choice in range(3)}) == 3
    assert world.ended(worker, "generation", "r").prefill_tokens == 22


def test_choices_that_find_no_page_to_branch_into_still_finish() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=5))
    prompt = random_prompt(random.Random(3), 13)
    world.send(worker, generate("r", prompt, n=4, max_tokens=5))
    world.drain()
    for choice in range(4):
        heard = world.choices["r", choice].tokens
        assert heard == expected(prompt, choice=choice, max_tokens=5)


def test_more_requests_than_pages_all_finish_by_suspending_the_youngest() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=12, max_sequence_tokens=48))
    rng = random.Random(5)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(1, 20)) for i in range(50)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, max_tokens=20, deadline_ms=10**9))
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=20)
    assert worker.gauges is not None
    assert worker.gauges.preemptions_total > 0


def test_decoding_is_never_held_up_by_more_than_one_chunk() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(max_batch_tokens=8))
    world.send(worker, generate("short", [1, 2, 3], max_tokens=30))
    world.run_until(lambda: ("short", 0) in world.choices)
    before = len(worker.executor.batches)
    world.send(worker, generate("long", list(range(90)), max_tokens=2))
    world.drain()
    decoding = worker.executor.batches[before : before + 20]
    for batch in decoding:
        assert sum(tokens for _, _, tokens in batch) <= 8
        assert any(tokens == 1 for _, _, tokens in batch)


def test_a_repair_goes_on_where_the_client_stands() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = random_prompt(random.Random(3), 11)
    outputs = [expected(prompt, choice=choice) for choice in range(3)]
    message = generate("r", prompt, n=3, emitted=[outputs[0][:3], [], outputs[2]], finished=(2,))
    for choice, have in ((0, 3), (2, 8)):
        world.choices["r", choice] = Choice(tokens=outputs[choice][:have])
    world.send(worker, message)
    world.drain()
    assert world.choices["r", 0].tokens == outputs[0]
    assert world.choices["r", 1].tokens == outputs[1]
    assert world.choices["r", 2].tokens == outputs[2]
    assert world.choices["r", 2].finish is None
    # The prompt is computed once: full blocks of it are shared.
    assert world.ended(worker, "generation", "r").prefill_tokens <= 11 + 3 + BLOCK


def test_a_repair_of_what_is_already_over_only_says_so() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = list(range(5))
    output = expected(prompt)
    world.choices["r", 0] = Choice(tokens=list(output))
    world.send(worker, generate("r", prompt, emitted=[output]))
    world.drain()
    assert world.choices["r", 0].finish == "length"
    assert worker.executor.batches == []


def test_stop_of_the_front_end_ends_oneChoice() -> None:
    world = SimWorld()
    worker = world.worker("w")
    prompt = list(range(6))
    world.send(worker, generate("r", prompt, n=2, max_tokens=30))
    world.run_until(lambda: len(world.choices.get(("r", 0), Choice()).tokens) >= 4)
    world.send(worker, Stop(request_id="r", choice=0, index=3))
    world.drain()
    assert len(world.choices["r", 0].tokens) < 10
    assert world.choices["r", 0].finish is None
    assert world.choices["r", 1].tokens == expected(prompt, choice=1, max_tokens=30)
    assert world.ended(worker, "generation", "r").outcome == "succeeded"


def test_cancel_before_during_and_after() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, Cancel(request_id="early"))
    world.send(worker, generate("early", [1, 2, 3]))
    world.send(worker, generate("running", [1, 2, 3], max_tokens=50))
    world.run_until(lambda: ("running", 0) in world.choices)
    world.send(worker, Cancel(request_id="running"))
    world.send(worker, generate("done", [1, 2, 3], max_tokens=1))
    world.drain()
    world.send(worker, Cancel(request_id="done"))
    world.send(worker, Cancel(request_id="done"))
    world.drain()
    assert world.ended(worker, "generation", "early").outcome == "cancelled"
    assert ("early", 0) not in world.choices
    assert world.ended(worker, "generation", "running").outcome == "cancelled"
    assert world.ended(worker, "generation", "done").outcome == "succeeded"


def test_a_late_cancel_does_not_hit_the_repair_that_follows() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("r", [1, 2], max_tokens=1))
    world.drain()
    world.send(worker, Cancel(request_id="r"))
    world.drain()
    world.legs.clear()
    world.choices.clear()
    world.send(worker, generate("r", [1, 2], max_tokens=3))
    world.drain()
    assert world.ended(worker, "generation", "r").outcome == "succeeded"


def test_a_deadline_passes_without_any_traffic() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, prefill("r", [1, 2, 3], worker.incarnation, deadline_ms=700))
    start = world.clock.now
    world.drain()
    ended = world.ended(worker, "context", "r")
    assert (ended.outcome, ended.code, ended.retryable) == ("failed", "deadline", False)
    assert world.clock.now - start >= 700


def test_duplicates_and_impossible_requests_are_rejected() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=8))
    world.send(worker, generate("same", [1, 2, 3], max_tokens=20))
    world.step()
    worker.inbox.clear()
    world.send(worker, generate("same", [4, 5, 6]))
    world.step()
    legs = world.legs["w", "generation", "same"]
    assert [ended.code for ended in legs.ended] == ["duplicate_request"]
    legs.ended.clear()
    world.send(worker, generate("long", list(range(32))))
    world.send(worker, generate("empty", []))
    world.send(worker, generate("strange", [VOCAB]))
    world.send(worker, generate("many", [1], n=9))
    world.send(worker, generate("none", [1], max_tokens=0))
    world.drain()
    codes = {
        name: world.ended(worker, "generation", name).code
        for name in ("long", "empty", "strange", "many", "none")
    }
    assert codes == {
        "long": "context_length_exceeded",
        "empty": "empty_prompt",
        "strange": "invalid_tokens",
        "many": "invalid_n",
        "none": "invalid_max_tokens",
    }
    assert "32" in world.ended(worker, "generation", "long").message
    assert world.ended(worker, "generation", "same").outcome == "succeeded"


def test_a_sequence_that_reaches_the_limit_ends_by_length() -> None:
    world = SimWorld()
    worker = world.worker("w", WorkerShape(slots=8))
    prompt = random_prompt(random.Random(3), 29)
    world.send(worker, generate("r", prompt, max_tokens=100))
    world.drain()
    assert world.choices["r", 0].tokens == expected(prompt, max_tokens=3)
    assert world.choices["r", 0].finish == "length"


def test_unusable_logits_end_their_request_only() -> None:
    world = SimWorld()
    worker = world.worker("w")
    worker.executor.poison.add(96)
    world.send(worker, generate("bad", [1, 2, 96]))
    world.send(worker, generate("good", [1, 2, 3]))
    world.drain()
    ended = world.ended(worker, "generation", "bad")
    assert (ended.outcome, ended.code, ended.retryable) == ("failed", "bad_logits", True)
    good = world.choices["good", 0].tokens
    assert good[:2] == expected([1, 2, 3])[:2]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,), (5, 9, None)])
def test_windows_and_replicas_keep_the_same_tables(windows: tuple[int | None, ...]) -> None:
    world = SimWorld(plan=fake_plan(*windows))
    worker = world.worker("w", WorkerShape(slots=24, replicas=2, max_sequence_tokens=60))
    rng = random.Random(9)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(1, 30)) for i in range(12)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, n=2, max_tokens=9))
    world.drain()
    for name, prompt in prompts.items():
        for choice in range(2):
            heard = world.choices[name, choice].tokens
            assert heard == expected(prompt, choice=choice, max_tokens=9)
