"""Fifty prompts through HTTP, two worker processes and UCX: every answer equals the replay oracle.

Each is sent at temperature 0 and at temperature 1 with a seed, cold (a cache salt of its own) and
warm (the same again). Nothing ends early: every emitted token of every choice is judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.cases import LENGTHS, Case, cases, prose
from tests.e2e.client import Client
from tests.support.oracle import OracleReport, ReferenceModel, check_equal
from worker.messages import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 10
AT_ONCE = 12
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Answer:
    """What came back for one case."""

    case: Case
    params: SamplingParams
    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    cached_tokens: int
    temperature_text: tuple[str, ...]


def seed_of(case: Case) -> int:
    return 1000 + sum(case.name.encode())


def ask(client: Client, case: Case, temperature: float) -> Answer:
    """Send a case and check what can be seen without the model."""
    fields: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, **case.fields}
    common = {
        **fields,
        "temperature": temperature,
        "seed": seed_of(case),
        "return_token_ids": True,
        "cache_salt": f"{case.name} at {temperature}",
    }
    if case.messages is not None:
        answer = client.chat(list(case.messages), logprobs=True, top_logprobs=2, **common)
        prompt = answer["prompt_token_ids"]
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        listed = [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
    else:
        given = list(case.prompt) if isinstance(case.prompt, tuple) else case.prompt
        answer = client.complete(given, logprobs=2, **common)
        prompt = answer["choices"][0]["prompt_token_ids"]
        texts = [choice["text"] for choice in answer["choices"]]
        listed = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    outputs = tuple(tuple(choice["token_ids"]) for choice in answer["choices"])
    usage = answer["usage"]
    assert len(outputs) == fields.get("n", 1)
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == sum(map(len, outputs))
    assert listed == [len(output) for output in outputs]
    for choice, output, text in zip(answer["choices"], outputs, texts, strict=True):
        assert 1 <= len(output) <= fields["max_tokens"]
        if choice["finish_reason"] == "length":
            assert len(output) == fields["max_tokens"]
        for stop in fields.get("stop", ()):
            assert stop not in text
    params = SamplingParams(temperature=temperature, seed=seed_of(case), logprobs=2)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(case, params, tuple(prompt), outputs, cached, tuple(texts))


Reports = dict[tuple[object, ...], tuple[str, OracleReport]]


def judged(model: ReferenceModel, answers: Iterable[Answer], reports: Reports) -> Iterator[Answer]:
    """Pass answers on as they come, with a report for every distinct (prompt, output) that has none
    yet: the service goes on answering meanwhile.
    """
    for answer in answers:
        for choice, output in enumerate(answer.outputs):
            key = (answer.prompt, output, answer.params, choice)
            if key not in reports:
                name = f"{answer.case.name}[{choice}] at {answer.params.temperature}"
                report = check_equal(model, answer.prompt, output, answer.params, choice=choice)
                reports[key] = (name, report)
        yield answer


def test_fifty_prompts_cold_and_warm(
    client: Client, smollm2_tokenizer: Any, smollm2_reference: ReferenceModel
) -> None:
    ids = smollm2_tokenizer.encode(prose(4300))
    assert len(ids) >= 2 * max(LENGTHS)
    wanted = list(itertools.product(cases(ids), TEMPERATURES))
    assert len(wanted) == 100
    found: Reports = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = pool.map(lambda pair: ask(client, *pair), wanted)
        cold = list(judged(smollm2_reference, asked, found))
        asked = pool.map(lambda pair: ask(client, *pair), wanted)
        warm = list(judged(smollm2_reference, asked, found))
    reports = list(found.values())
    assert [a.cached_tokens for a in cold] == [0] * len(cold)
    for answer in warm:
        # The last token is always computed, for its logits.
        assert answer.cached_tokens >= (len(answer.prompt) - 1) // 64 * 64
    wrong = [f"{name}: {report}" for name, report in reports if not report.ok]
    assert wrong == []
    positions = sum(report.positions for _, report in reports)
    exact = sum(report.exact for _, report in reports)
    print(f"{exact} of {positions} positions are exactly the oracle's")
    assert exact >= 0.99 * positions


def test_drawn_answers_differ_between_choices_and_seeds(client: Client) -> None:
    """The noise is keyed by seed and choice: equal keys agree, others do not."""
    ask_for: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "return_token_ids": True}
    question = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
    first = client.chat(question, n=3, seed=5, **ask_for)["choices"]
    again = client.chat(question, n=3, seed=5, **ask_for)["choices"]
    other = client.chat(question, n=3, seed=6, **ask_for)["choices"]
    tokens = [tuple(choice["token_ids"]) for choice in first]
    assert len(set(tokens)) == 3
    assert [tuple(choice["token_ids"]) for choice in again] == tokens
    assert [tuple(choice["token_ids"]) for choice in other] != tokens


def test_capital_of_france(client: Client) -> None:
    streamed = client.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
    )
    assert "Paris" in streamed.choices[0].text
    assert streamed.done
