"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.http.answers import PromptIds
from services.http.chat_answers import ChatAnswers
from services.http.endpoint import ApiContext, Job, answer_body, answer_head, run_job
from services.http.prompts import read_conversation
from services.http.sampling import logprobs_of_chat, within_context
from services.http.schemas import parse_chat
from services.text.detokenizer import Detokenizer


def chat_router(context: ApiContext) -> APIRouter:
    """The chat endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer_body(http, context, lambda body: _answer(context, http, body))

    return router


async def _answer(context: ApiContext, http: Request, body: dict[str, Any]) -> Response:
    request = parse_chat(body)
    bounds = context.bounds(request.model)
    conversation = read_conversation(request, body)
    with within_context(request, bounds.limits):
        tokens = await context.text.encode_chat(
            conversation, limit=bounds.limits.max_sequence_tokens
        )
    job = Job(
        request=request,
        bounds=bounds,
        prompts=[tokens],
        logprobs=logprobs_of_chat(request),
        endpoint="chat",
        detokenizer=Detokenizer.of_text,
    )
    head = answer_head(job, http, "chatcmpl")
    prompts = PromptIds(job.prompts, request.n or 1)
    return await run_job(context, http, job, ChatAnswers(head, context.text.vocabulary, prompts))
