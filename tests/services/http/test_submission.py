"""What the cluster is asked for, for every way a client may put it."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from services.orchestration.api import GenerationRequest, SamplingParams
from tests.services.http.conftest import FrontEnd
from tests.support.tiny_tokenizers import EOS, byte_level_tokenizer, token_id

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EOS_ID = token_id(byte_level_tokenizer(), EOS)
USER = {"role": "user", "content": "hi"}


async def submitted(
    served: FrontEnd, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any
) -> GenerationRequest:
    """The request that a body turned into."""
    base = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    response = await served.client.post(
        path, json={"model": "tiny", **base, **fields}, headers=headers or {}
    )
    assert response.status_code == 200, response.text
    return served.service.requests[-1]


def text_of(request: GenerationRequest) -> str:
    return byte_level_tokenizer().decode(request.tokens.tolist(), skip_special_tokens=False)


async def test_defaults(greeter: FrontEnd) -> None:
    request = await submitted(greeter)
    assert text_of(request) == "<|role|>user\nhi<|end|>\n<|role|>assistant\n"
    assert request.sampling == SamplingParams(seed=request.sampling.seed)
    assert request.stop.stop_token_ids == (EOS_ID,)
    assert request.stop.max_tokens == 256 - len(request.tokens)
    assert (request.n, request.conversation_id, request.endpoint) == (1, None, "chat")
    assert request.deadline_ms == 600_000
    other = await submitted(greeter)
    assert other.sampling.seed != request.sampling.seed
    assert (await submitted(greeter, COMPLETIONS)).stop.max_tokens == 16


async def test_the_remaining_context_is_the_default_of_chat(greeter: FrontEnd) -> None:
    nothing: list[dict[str, Any]] = [{}, {"max_tokens": None}, {"max_completion_tokens": None}]
    for fields in nothing:
        request = await submitted(greeter, **fields)
        assert request.stop.max_tokens + len(request.tokens) == 256


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 7},
        {"max_completion_tokens": 7},
        {"max_tokens": 7, "max_completion_tokens": 7},
        {"max_tokens": None, "max_completion_tokens": 7},
    ],
)
async def test_both_names_of_the_limit(greeter: FrontEnd, fields: dict[str, Any]) -> None:
    assert (await submitted(greeter, **fields)).stop.max_tokens == 7


async def test_every_sampling_parameter(greeter: FrontEnd) -> None:
    request = await submitted(
        greeter,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=42,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={"7": -100, "3": 2.5},
        logprobs=True,
        top_logprobs=3,
        n=2,
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=[5, 4],
    )
    assert request.sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=42,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        logit_bias=((3, 2.5), (7, -100.0)),
        logprobs=3,
    )
    assert request.n == 2
    assert request.stop.min_tokens == 2
    assert request.stop.stop_token_ids == (4, 5, EOS_ID)


async def test_top_k_beyond_the_vocabulary_keeps_every_token(greeter: FrontEnd) -> None:
    request = await submitted(greeter, top_k=10**30)
    assert request.sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False}, None),
    ],
)
async def test_log_probabilities_of_chat(
    greeter: FrontEnd, fields: dict[str, Any], expected: int | None
) -> None:
    assert (await submitted(greeter, **fields)).sampling.logprobs == expected


async def test_log_probabilities_of_completions(greeter: FrontEnd) -> None:
    for logprobs in (None, 0, 5):
        request = await submitted(greeter, COMPLETIONS, logprobs=logprobs)
        assert request.sampling.logprobs == logprobs


async def test_seeds_fit_the_wire(greeter: FrontEnd) -> None:
    for seed, expected in ((0, 0), (-1, 2**63 - 1), (2**63 + 5, 5), (10**30, 10**30 % 2**63)):
        assert (await submitted(greeter, seed=seed)).sampling.seed == expected


async def test_a_nucleus_of_nothing_is_the_best_token(greeter: FrontEnd) -> None:
    sampling = (await submitted(greeter, top_p=0, top_k=-1)).sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)
    assert (await submitted(greeter, top_k=-1)).sampling.top_k == 0


async def test_ignoring_the_end_of_sequence(greeter: FrontEnd) -> None:
    assert (await submitted(greeter, ignore_eos=True)).stop.stop_token_ids == ()
    request = await submitted(greeter, ignore_eos=True, stop_token_ids=[5])
    assert request.stop.stop_token_ids == (5,)


async def test_prompts_in_every_form(greeter: FrontEnd) -> None:
    raw = byte_level_tokenizer()
    hello, world = raw.encode("hello").ids, raw.encode("the world").ids
    for prompt, expected in (
        ("hello", [hello]),
        (["hello"], [hello]),
        (["hello", "the world"], [hello, world]),
        (hello, [hello]),
        ([hello, world], [hello, world]),
        (["hello", world], [hello, world]),
        (" ", [raw.encode(" ").ids]),
    ):
        before = len(greeter.service.requests)
        await submitted(greeter, COMPLETIONS, prompt=prompt)
        assert [r.tokens.tolist() for r in greeter.service.requests[before:]] == expected


async def test_contents_in_every_form(greeter: FrontEnd) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = await submitted(
        greeter,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "assistant", "tool_calls": calls},
            {"role": "user", "content": []},
        ],
    )
    assert text_of(request) == (
        "<|role|>system\nbe kind<|end|>\n<|role|>user\none\ntwo<|end|>\n"
        "<|role|>assistant\n<|end|>\n<|role|>tool\n<|end|>\n<|role|>assistant\n<|end|>\n"
        "<|role|>user\n<|end|>\n<|role|>assistant\n"
    )


async def test_the_generation_prompt_can_be_left_out(greeter: FrontEnd) -> None:
    request = await submitted(greeter, add_generation_prompt=False)
    assert text_of(request) == "<|role|>user\nhi<|end|>\n"


async def test_scopes_are_separate(greeter: FrontEnd) -> None:
    plain = (await submitted(greeter)).scope
    again = (await submitted(greeter, COMPLETIONS)).scope
    salted = (await submitted(greeter, cache_salt="a")).scope
    other = (await submitted(greeter, cache_salt="b")).scope
    assert plain == again
    assert len({plain, salted, other}) == 3
    assert (await submitted(greeter, cache_salt="a")).scope == salted


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"x-session-id": "s"}, {"user": "u", "conversation_id": "c"}, "s"),
        ({"x-conversation-id": "h"}, {"user": "u", "conversation_id": "c"}, "h"),
        ({}, {"user": "u", "conversation_id": "c", "prompt_cache_key": "p"}, "c"),
        ({}, {"user": "u", "prompt_cache_key": "p"}, "p"),
        ({}, {"user": "u"}, "u"),
        ({"x-session-id": ""}, {"user": ""}, None),
    ],
)
async def test_conversations(
    greeter: FrontEnd, headers: dict[str, str], fields: dict[str, Any], expected: str | None
) -> None:
    for path in (CHAT, COMPLETIONS):
        request = await submitted(greeter, path, headers=headers, **fields)
        assert request.conversation_id == expected


async def test_a_long_label_stays_a_label(greeter: FrontEnd) -> None:
    labels = {
        (await submitted(greeter, headers={"x-session-id": "s" * 1000 + end})).conversation_id
        for end in "ab"
    }
    assert len(labels) == 2
    assert all(label is not None and len(label) == 64 for label in labels)


async def test_extensions_through_the_official_client(greeter: FrontEnd) -> None:
    client: AsyncOpenAI = greeter.openai
    await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        extra_body={"top_k": 3, "ignore_eos": True},
        extra_headers={"x-session-id": "s"},
    )
    request = greeter.service.requests[-1]
    assert (request.sampling.top_k, request.conversation_id) == (3, "s")
