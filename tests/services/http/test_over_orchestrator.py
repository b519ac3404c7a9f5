"""The whole front end but its process: the API over the orchestration, with fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from services.http.app import create_app
from services.http.settings import HttpSettings
from services.orchestration.worker_link import LinkTimings
from services.text.detokenizer import decode
from services.text.tokenizer import GenerationFacts, Tokenizer
from tests.services.orchestration.rig import Rig, make_settings, pair, rig
from tests.support.fake_tokens import FAKE_VOCAB_SIZE, fake_output
from tests.support.http_server import serving
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer, token_id
from worker.messages import Cancel, Stop

COMPLETIONS = "/v1/completions"
PROMPT = list(range(10, 40))


@dataclass(frozen=True)
class Served:
    rig: Rig
    client: httpx.AsyncClient
    text: Tokenizer

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"model": self.rig.service.limits().model, "prompt": PROMPT, "seed": 7, **fields}
        response = await self.client.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    raw = byte_level_tokenizer()
    facts = GenerationFacts(
        eos_token_ids=(token_id(raw, EOS),),
        max_position_tokens=4096,
        vocab_size=FAKE_VOCAB_SIZE,
        model_name="fake",
    )
    text = Tokenizer(raw, facts, CHAT_TEMPLATE)
    async with rig(pair(), make_settings(timings=LinkTimings())) as built:
        app = create_app(built.service, text, HttpSettings(), registry=built.registry)
        async with (
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client,
        ):
            yield Served(built, client, text)
    text.close()


async def test_an_answer_is_the_text_of_the_workers_tokens() -> None:
    async with served() as api:
        answer = await api.complete(max_tokens=20, n=3, ignore_eos=True, return_token_ids=True)
        for choice in answer["choices"]:
            ids = list(fake_output(PROMPT, 7, choice["index"], 20))
            assert choice["token_ids"] == ids
            assert choice["text"] == decode(api.text.vocabulary, ids)
            assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 60
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_a_stop_string_reaches_the_worker_and_bounds_the_usage() -> None:
    async with served() as api:
        ids = list(fake_output(PROMPT, 7, 0, 200))
        text = decode(api.text.vocabulary, ids)
        stop = text[3:6]
        fields = {"max_tokens": 200, "ignore_eos": True, "stop": [stop], "return_token_ids": True}
        answer = await api.complete(**fields)
        choice = answer["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        used = answer["usage"]["completion_tokens"]
        assert choice["token_ids"] == ids[:used]
        assert used < 200
        assert {message.index for message in api.rig.received(Stop)} <= {used}
        # A stop string that ends with the last token allowed is still a stop.
        for max_tokens in (used, used + 1):
            again = await api.complete(**{**fields, "max_tokens": max_tokens, "n": 2})
            assert again["choices"][0]["text"] == choice["text"]
            assert again["choices"][0]["finish_reason"] == "stop"


async def test_one_token_comes_from_the_context_worker_alone() -> None:
    async with served() as api:
        answer = await api.complete(max_tokens=1, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_leaving_ends_the_legs_on_the_workers() -> None:
    """The rig checks on its way out that nothing of the request is left."""
    async with served() as api:
        body = {
            "model": api.rig.service.limits().model,
            "prompt": PROMPT,
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        async with api.client.stream("POST", COMPLETIONS, json=body) as response:
            await anext(response.aiter_lines())
        async with asyncio.timeout(1):
            await api.rig.idle()
        assert api.rig.received(Cancel)
