"""Whole transcripts of streams, compared byte by byte with tests/golden.

Ids and times differ from run to run and are replaced by fixed ones. A transcript that has to change
is written anew by running this file with UPDATE_GOLDEN=1, and reviewed like code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.orchestration.api import Failed, GenerationRequest, TokenDelta
from tests.services.http.conftest import StartFrontEnd
from tests.support.scripted_service import Step, answer
from tests.support.tiny_tokenizers import EOS, byte_level_tokenizer, token_id

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
RAW = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def ids(text: str) -> list[int]:
    return [*RAW.encode(text, add_special_tokens=False).ids, token_id(RAW, EOS)]


def greeting(request: GenerationRequest) -> list[Step]:
    return answer(request, [ids("the \u00e9\U0001f600")], cached_tokens=8, transferred_bytes=4096)


def two_choices(request: GenerationRequest) -> list[Step]:
    return answer(request, [ids("the stop sign"), ids("hello")])


def cut_short(request: GenerationRequest) -> list[Step]:
    return answer(request, [ids("ab\U0001f600")[:-2]], "length")


def failing(request: GenerationRequest) -> list[Step]:
    first, second, _ = ids("ab")
    return [
        TokenDelta(0, 0, (first,)),
        TokenDelta(0, 1, (second,)),
        Failed("worker_lost", "every worker was lost", 503, 1),
    ]


SCENARIOS: list[tuple[str, str, dict[str, Any], Any]] = [
    ("chat", CHAT, {"messages": MESSAGES}, greeting),
    (
        "chat_usage",
        CHAT,
        {"messages": MESSAGES, "stream_options": {"include_usage": True}},
        greeting,
    ),
    (
        "chat_logprobs",
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        greeting,
    ),
    (
        "chat_two_choices_and_stop",
        CHAT,
        {
            "messages": MESSAGES,
            "n": 2,
            "stop": [" sign", "zzz"],
            "stream_options": {"include_usage": True},
        },
        two_choices,
    ),
    ("chat_length", CHAT, {"messages": MESSAGES, "max_tokens": 5}, cut_short),
    (
        "chat_failure",
        CHAT,
        {"messages": MESSAGES, "stream_options": {"include_usage": True}},
        failing,
    ),
    ("completion", COMPLETIONS, {"prompt": "hi"}, greeting),
    (
        "completion_logprobs",
        COMPLETIONS,
        {"prompt": "hi", "logprobs": 1, "stream_options": {"include_usage": True}},
        greeting,
    ),
    ("completion_two_prompts", COMPLETIONS, {"prompt": ["a", "b"]}, greeting),
]


@pytest.mark.parametrize(
    ("name", "path", "body", "script"), SCENARIOS, ids=[s[0] for s in SCENARIOS]
)
async def test_transcript(
    start: StartFrontEnd, name: str, path: str, body: dict[str, Any], script: Any
) -> None:
    async with start(script) as served:
        response = await served.client.post(
            path,
            json={"model": "tiny", "stream": True, **body},
            headers={"x-pageferry-details": "1"},
        )
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]+"', r'"id":"\1-0"', response.text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    golden = GOLDEN / f"{name}.sse"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text("utf-8")
