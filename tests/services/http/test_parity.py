"""A stream says what the plain answer says, for every parameter that touches the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.orchestration.api import FinishReason, GenerationRequest
from tests.services.http.conftest import FrontEnd, StartFrontEnd
from tests.support.scripted_service import Step, answer
from tests.support.tiny_tokenizers import EOS, byte_level_tokenizer, token_id

RAW = byte_level_tokenizer()
TEXT = "the caf\u00e9 stop\U0001f600 \ud55c\uae00 the end"
IDS = RAW.encode(TEXT, add_special_tokens=False).ids
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 100},
}


def script(request: GenerationRequest) -> list[Step]:
    length = min(len(IDS), request.stop.max_tokens)
    reason: FinishReason = "length"
    tokens = IDS[:length]
    if length < request.stop.max_tokens:
        tokens, reason = [*tokens, token_id(RAW, EOS)], "stop"
    return answer(request, [tokens] * request.n, reason, cached_tokens=3)


async def both(served: FrontEnd, path: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain answer, and the same shape put together from the stream."""
    body = {"model": "tiny", **BODIES[path], **fields}
    plain = (await served.client.post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await served.client.post(path, json={**body, **options})
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json_of(line) for line in lines]
    return plain, joined(path, chunks)


def json_of(line: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return value


def joined(path: str, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Text, log-probabilities and finish reason of every choice, and usage."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(
                part["index"], {"text": "", "logprobs": [], "token_ids": [], "finish": None}
            )
            assert whole["finish"] is None
            whole["text"] += part["delta"].get("content", "") if path == CHAT else part["text"]
            whole["logprobs"] += entries(part["logprobs"])
            whole["token_ids"] += part.get("token_ids", [])
            whole["finish"] = part["finish_reason"]
    return {"choices": choices, "usage": chunks[-1]["usage"]}


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, whatever the shape."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[column] for column in columns), strict=True))


def shape(path: str, plain: dict[str, Any]) -> dict[str, Any]:
    return {
        "choices": {
            choice["index"]: {
                "text": choice["message"]["content"] if path == CHAT else choice["text"],
                "logprobs": entries(choice["logprobs"]),
                "token_ids": choice.get("token_ids", []),
                "finish": choice["finish_reason"],
            }
            for choice in plain["choices"]
        },
        "usage": plain["usage"],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, len(IDS), len(IDS) + 1])
async def test_log_probabilities_and_counts(
    start: StartFrontEnd, path: str, max_tokens: int
) -> None:
    logprobs: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    )
    async with start(script) as served:
        plain, streamed = await both(
            served, path, max_tokens=max_tokens, n=3, return_token_ids=True, **logprobs
        )
    assert shape(path, plain) == streamed
    assert sorted(streamed["choices"]) == [0, 1, 2]
    count = min(max_tokens, len(IDS) + 1)
    for choice in streamed["choices"].values():
        assert len(choice["logprobs"]) == len(choice["token_ids"]) == count
        assert choice["finish"] == ("length" if max_tokens <= len(IDS) else "stop")
    assert plain["usage"]["completion_tokens"] == 3 * count
    assert plain["usage"]["prompt_tokens"] > 0
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_stop_strings_at_every_offset(start: StartFrontEnd) -> None:
    async with start(script) as served:
        for length in (1, 2, 3, 5, 8):
            for at in range(0, len(TEXT) - length + 1, 4):
                stop = TEXT[at : at + length]
                path = (CHAT, COMPLETIONS)[at % 2]
                plain, streamed = await both(served, path, stop=[stop])
                assert shape(path, plain) == streamed
                assert streamed["choices"][0]["text"] == TEXT[: TEXT.index(stop)]
                assert streamed["choices"][0]["finish"] == "stop"
                used = streamed["usage"]["completion_tokens"]
                assert served.service.streams[-1].stops == [(0, used)]
                # The fewest tokens whose text holds the whole stop string.
                assert stop in RAW.decode(IDS[:used])
                assert stop not in RAW.decode(IDS[: used - 1]).rstrip("\ufffd")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_several_choices_stop_one_by_one(start: StartFrontEnd, path: str) -> None:
    def different(request: GenerationRequest) -> list[Step]:
        return answer(request, [IDS, IDS[:4], IDS[1:]], "length")

    async with start(different) as served:
        plain, streamed = await both(served, path, n=3, stop="stop")
    assert shape(path, plain) == streamed
    assert [choice["finish"] for choice in streamed["choices"].values()] == [
        "stop",
        "length",
        "stop",
    ]


async def test_several_prompts_with_several_choices(start: StartFrontEnd) -> None:
    def script_of_prompt(request: GenerationRequest) -> list[Step]:
        first = int(request.tokens[0])
        return answer(request, [[first, first + 1]] * request.n, "length", cached_tokens=2)

    prompts = [[10], [20, 30], [40]]
    async with start(script_of_prompt) as served:
        plain, streamed = await both(
            served, COMPLETIONS, prompt=prompts, n=2, return_token_ids=True, max_tokens=2
        )
    assert shape(COMPLETIONS, plain) == streamed
    ids = [streamed["choices"][at]["token_ids"] for at in range(6)]
    assert ids == [[10, 11]] * 2 + [[20, 21]] * 2 + [[40, 41]] * 2
    assert [choice["prompt_token_ids"] for choice in plain["choices"]] == [
        prompt for prompt in prompts for _ in range(2)
    ]
    assert streamed["usage"]["prompt_tokens"] == 4
    assert streamed["usage"]["completion_tokens"] == 12
    assert streamed["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_is_streamed_on_request_only(
    greeter: FrontEnd, options: dict[str, Any] | None
) -> None:
    body = {"model": "tiny", **BODIES[CHAT], "stream": True, "stream_options": options}
    response = await greeter.client.post(CHAT, json=body)
    assert "usage" not in response.text


async def test_details_are_shown_on_request_only(greeter: FrontEnd) -> None:
    body = {"model": "tiny", **BODIES[CHAT]}
    plain = (await greeter.client.post(CHAT, json=body)).json()
    assert "pageferry" not in plain
    shown = await greeter.client.post(CHAT, json=body, headers={"x-pageferry-details": "1"})
    assert shown.json()["pageferry"] == {"transferred_bytes": 0, "repaired": False}
