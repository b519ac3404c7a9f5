"""A front end around scripted streams, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client import CollectorRegistry

from services.http.app import create_app
from services.http.settings import HttpSettings
from services.orchestration.api import ModelLimits
from services.text.tokenizer import GenerationFacts, Tokenizer
from tests.support.http_server import serving
from tests.support.scripted_service import Script, ScriptedService, answer
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer, token_id

MODEL = "tiny"
MAX_TOKENS = 256


@dataclass(frozen=True)
class FrontEnd:
    """A served application with everything a test looks at."""

    service: ScriptedService
    text: Tokenizer
    registry: CollectorRegistry
    url: str
    client: httpx.AsyncClient
    openai: AsyncOpenAI

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return byte_level_tokenizer().encode(text, add_special_tokens=False).ids

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric; 0 when it was never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def idle(self) -> None:
        """Return when no request is being served."""
        async with asyncio.timeout(1):
            while self.metric("pageferry_http_in_flight"):  # noqa: ASYNC110  a gauge has no event
                await asyncio.sleep(0)


StartFrontEnd = Callable[..., AbstractAsyncContextManager[FrontEnd]]


@asynccontextmanager
async def front_end(
    script: Script | None = None,
    *,
    service_type: type[ScriptedService] = ScriptedService,
    settings: HttpSettings | None = None,
    max_sequence_tokens: int = MAX_TOKENS,
    refusal: Exception | None = None,
    template: str | None = CHAT_TEMPLATE,
) -> AsyncIterator[FrontEnd]:
    """Serve the API on a socket. Without a script every answer is ``hello``."""
    raw = byte_level_tokenizer()
    facts = GenerationFacts(
        eos_token_ids=(token_id(raw, EOS),),
        max_position_tokens=max_sequence_tokens,
        vocab_size=raw.get_vocab_size(),
        model_name=MODEL,
    )
    text = Tokenizer(raw, facts, template)
    greeting = [*raw.encode("hello", add_special_tokens=False).ids, token_id(raw, EOS)]
    service = service_type(
        script or (lambda request: answer(request, [greeting] * request.n)),
        ModelLimits(MODEL, max_sequence_tokens, facts.vocab_size, 16),
        refusal,
    )
    registry = CollectorRegistry()
    app = create_app(service, text, settings or HttpSettings(), registry=registry)
    # Nothing is encrypted here, and reading the machine's certificates takes longer than a test.
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client,
        AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False),
        ) as openai,
    ):
        yield FrontEnd(service, text, registry, url, client, openai)
    text.close()


@pytest.fixture
def start() -> StartFrontEnd:
    """``async with start(script) as front_end``."""
    return front_end


@pytest.fixture
async def greeter() -> AsyncIterator[FrontEnd]:
    """A front end that answers ``hello`` to everything."""
    async with front_end() as served:
        yield served
