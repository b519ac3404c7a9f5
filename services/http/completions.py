"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.http.answers import PromptIds
from services.http.completion_answers import CompletionAnswers
from services.http.endpoint import ApiContext, Job, answer_body, answer_head, run_job
from services.http.errors import invalid
from services.http.prompts import Prompt, count_prompts, read_prompts
from services.http.sampling import choices_per_prompt, within_context
from services.http.schemas import parse_completion
from services.orchestration.api import ModelLimits
from services.text.detokenizer import Detokenizer
from services.text.tokenizer import TokenIds


def completions_router(context: ApiContext) -> APIRouter:
    """The completion endpoint."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer_body(http, context, lambda body: _answer(context, http, body))

    return router


async def _answer(context: ApiContext, http: Request, body: dict[str, Any]) -> Response:
    request = parse_completion(body)
    bounds = context.bounds(request.model)
    if request.prompt is None:
        raise invalid(
            "Missing required parameter: 'prompt'.",
            param="prompt",
            code="missing_required_parameter",
        )
    choices_per_prompt(request, count_prompts(request.prompt), context.settings)
    with within_context(request, bounds.limits):
        given = read_prompts(request.prompt, bounds.limits)
        prompts = [await _encoded(context, prompt, bounds.limits) for prompt in given]
    job = Job(
        request=request,
        bounds=bounds,
        prompts=prompts,
        logprobs=request.logprobs,
        endpoint="completions",
        detokenizer=Detokenizer.of_continuation,
    )
    head = answer_head(job, http, "cmpl")
    return await run_job(
        context,
        http,
        job,
        CompletionAnswers(head, context.text.vocabulary, PromptIds(prompts, request.n or 1)),
    )


async def _encoded(context: ApiContext, prompt: Prompt, limits: ModelLimits) -> TokenIds:
    if not isinstance(prompt, str):
        return prompt
    tokens = await context.text.encode_prompt(prompt, limit=limits.max_sequence_tokens)
    if not len(tokens):
        raise invalid(
            "Invalid 'prompt': expected at least one token, got text without any.",
            param="prompt",
            code="invalid_prompt",
        )
    return tokens
