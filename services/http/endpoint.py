"""The path that every generating endpoint shares, from checked prompts to the answer.

There is one path for streams and plain answers, for chat and completions, so that limits,
cancellation, usage and stop rules cannot differ between them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from services.http.answers import AnswerHead, Answers, WholeChoice
from services.http.assembly import TextRule
from services.http.body import read_json_object
from services.http.disconnect import ClientGone, unless_gone
from services.http.errors import json_response, model_not_found
from services.http.generation import Generation
from services.http.metrics import HttpMetrics
from services.http.sampling import (
    Bounds,
    cache_scope,
    choices_per_prompt,
    conversation_label,
    max_output_tokens,
    sampling_params,
    stop_rule,
    stop_strings,
)
from services.http.schemas import SamplingFields
from services.http.settings import HttpSettings
from services.http.streaming import EventStreamResponse
from services.orchestration.api import GenerationRequest, GenerationService
from services.text.detokenizer import Detokenizer
from services.text.tokenizer import TokenIds, Tokenizer
from services.text.vocabulary import Vocabulary

DETAILS_HEADER: Final = "x-pageferry-details"
_CLIENT_GONE: Final = 499
"""Never seen by anyone; counted."""


@dataclass(frozen=True)
class ApiContext:
    """What endpoints are built from."""

    service: GenerationService
    text: Tokenizer
    settings: HttpSettings
    metrics: HttpMetrics

    def bounds(self, model: str) -> Bounds:
        """What a request for ``model`` is checked against. Raises ApiError, or NotReady."""
        limits = self.service.limits()
        if model != limits.model:
            raise model_not_found(model, limits.model)
        return Bounds(self.settings, limits, self.text.facts.eos_token_ids)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request whose prompts are tokenized."""

    request: SamplingFields
    bounds: Bounds
    prompts: Sequence[TokenIds]
    logprobs: int | None
    endpoint: str
    detokenizer: Callable[[Vocabulary], Detokenizer]


def answer_head(job: Job, http: Request, prefix: str) -> AnswerHead:
    """Identity and extras of the answer to ``job``."""
    return AnswerHead(
        answer_id=f"{prefix}-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=job.bounds.limits.model,
        with_logprobs=job.logprobs is not None,
        alternatives=job.logprobs or 0,
        with_token_ids=bool(job.request.return_token_ids),
        with_stream_usage=bool(job.request.stream) and job.request.include_usage,
        with_details=http.headers.get(DETAILS_HEADER) == "1",
    )


async def answer_body(
    http: Request,
    context: ApiContext,
    work: Callable[[dict[str, Any]], Coroutine[Any, Any, Response]],
) -> Response:
    """The answer that ``work`` makes of the body. When the client goes away, ``work`` ends."""
    try:
        body = await read_json_object(http, context.settings)
        return await unless_gone(http.receive, work(body))
    except ClientGone:
        context.metrics.client_disconnects.inc()
        return Response(status_code=_CLIENT_GONE)


async def run_job(context: ApiContext, http: Request, job: Job, answers: Answers) -> Response:
    """Start ``job`` and answer it. Raises ApiError, or what ``submit`` raises."""
    generation = await _start(context, http, job)
    if job.request.stream:
        return await _streamed(context, generation, answers)
    try:
        return await _collected(generation, answers)
    finally:
        await generation.aclose()


async def _start(context: ApiContext, http: Request, job: Job) -> Generation:
    request, bounds = job.request, job.bounds
    n = choices_per_prompt(request, len(job.prompts), bounds.settings)
    sampling = sampling_params(request, job.logprobs, bounds)
    stops = stop_strings(request, bounds.settings)
    requests = [
        GenerationRequest(
            tokens=tokens,
            scope=cache_scope(bounds.limits.model, request.cache_salt),
            sampling=sampling,
            stop=stop_rule(request, max_output_tokens(request, len(tokens), bounds.limits), bounds),
            deadline_ms=round(bounds.settings.request_timeout_s * 1000),
            n=n,
            conversation_id=conversation_label(http.headers, request),
            endpoint=job.endpoint,
        )
        for tokens in job.prompts
    ]
    rule = TextRule(stops, frozenset(requests[0].stop.stop_token_ids), requests[0].stop.min_tokens)
    vocabulary = context.text.vocabulary
    detokenizers = [[job.detokenizer(vocabulary) for _ in range(n)] for _ in requests]
    return await Generation.start(context.service, requests, rule, detokenizers)


async def _streamed(context: ApiContext, generation: Generation, answers: Answers) -> Response:
    """A stream, once its first event is there: a request that fails before gets a real status."""
    try:
        await generation.wait_for_event(context.settings.keep_alive_s)
        generation.raise_early_failure()
    except BaseException:
        await generation.aclose()
        raise
    return EventStreamResponse(generation, answers, context.settings, context.metrics)


async def _collected(generation: Generation, answers: Answers) -> Response:
    choices = [WholeChoice(index) for index in range(generation.choices)]
    while (delta := await generation.next_delta()) is not None:
        choices[delta.choice].add(delta)
    return json_response(answers.whole(choices, generation.usage))
