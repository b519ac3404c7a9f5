"""From request fields to the values workers take: sampling, stop rule, scope, labels.

Everything is checked against the model's limits here, so that no worker ever sees a request it
would have to refuse.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.datastructures import Headers

from services.http.errors import (
    ApiError,
    context_certainly_exceeded,
    context_length_exceeded,
    invalid,
)
from services.http.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from services.http.settings import HttpSettings
from services.orchestration.api import ModelLimits, SamplingParams, StopRule
from services.text.stop_strings import StopStrings
from services.text.tokenizer import TooManyTokens

NumberT = TypeVar("NumberT", int, float)

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for /v1/completions; a chat answer may take what the context has left."""
_SEED_BITS: Final = 63
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")
_MAX_LABEL: Final = 256
_CONVERSATION_HEADERS: Final = ("x-session-id", "x-conversation-id")


@dataclass(frozen=True)
class Bounds:
    """What a request is checked against."""

    settings: HttpSettings
    limits: ModelLimits
    eos_token_ids: Collection[int]


def sampling_params(
    request: SamplingFields, logprobs: int | None, bounds: Bounds
) -> SamplingParams:
    """How tokens are drawn; ``logprobs`` as the wire has it. Raises ApiError."""
    if logprobs is not None and logprobs > bounds.settings.max_logprobs:
        name = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
        raise _above(name, logprobs, bounds.settings.max_logprobs)
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    is_best_only = request.top_p == 0
    return SamplingParams(
        temperature=_given(request.temperature, 1.0),
        top_p=1.0 if is_best_only else _given(request.top_p, 1.0),
        top_k=1 if is_best_only else _top_k(request.top_k, bounds.limits.vocab_size),
        min_p=request.min_p or 0.0,
        seed=seed % (1 << _SEED_BITS),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, bounds),
        logprobs=logprobs,
    )


def stop_rule(request: SamplingFields, max_tokens: int, bounds: Bounds) -> StopRule:
    """When a choice ends by itself. Raises ApiError."""
    named = request.stop_token_ids or []
    if len(named) > bounds.settings.max_stop_token_ids:
        raise _above("stop_token_ids", len(named), bounds.settings.max_stop_token_ids)
    if any(not 0 <= token_id < bounds.limits.vocab_size for token_id in named):
        raise _not_in_vocabulary("stop_token_ids", bounds.limits.vocab_size)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise _above("min_tokens", min_tokens, max_tokens)
    own = () if request.ignore_eos else bounds.eos_token_ids
    return StopRule(
        max_tokens=max_tokens,
        stop_token_ids=tuple(sorted({*own, *named})),
        min_tokens=min_tokens,
    )


def stop_strings(request: SamplingFields, settings: HttpSettings) -> StopStrings:
    """Stop strings of a request. Raises ApiError."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > settings.max_stop_strings:
        raise _above("stop", len(stops), settings.max_stop_strings)
    if any(not 0 < len(stop) <= settings.max_stop_characters for stop in stops):
        raise invalid(
            f"Invalid 'stop': expected strings of 1 to {settings.max_stop_characters} characters.",
            param="stop",
            code="invalid_value",
        )
    return StopStrings(stops)


def choices_per_prompt(request: SamplingFields, prompts: int, settings: HttpSettings) -> int:
    """``n``, bounded alone and together with the number of prompts. Raises ApiError."""
    n = request.n or 1
    if n > settings.max_n:
        raise _above("n", n, settings.max_n)
    if n * prompts > settings.max_choices:
        raise invalid(
            f"Invalid 'prompt': expected at most {settings.max_choices} choices in all, got"
            f" {prompts} prompts with n = {n}; send several requests.",
            param="prompt",
            code="integer_above_max_value",
        )
    return n


def max_output_tokens(request: SamplingFields, prompt_tokens: int, limits: ModelLimits) -> int:
    """Output tokens that one choice may have. Raises ApiError when the context cannot hold them."""
    asked = _asked_tokens(request)
    left = limits.max_sequence_tokens - prompt_tokens
    if asked is None:
        is_chat = isinstance(request, ChatCompletionRequest)
        asked = max(1, left if is_chat else min(left, DEFAULT_COMPLETION_TOKENS))
    if asked > left:
        raise context_length_exceeded(
            limits.max_sequence_tokens, prompt_tokens, asked, param=_prompt_field(request)
        )
    return asked


@contextmanager
def within_context(request: SamplingFields, limits: ModelLimits) -> Iterator[None]:
    """Raises ApiError where a prompt is refused inside as too long for the model."""
    try:
        yield
    except TooManyTokens as error:
        asked = _asked_tokens(request) or 1
        raise context_certainly_exceeded(
            limits.max_sequence_tokens, error.at_least, asked, param=_prompt_field(request)
        ) from None


def _prompt_field(request: SamplingFields) -> str:
    return "messages" if isinstance(request, ChatCompletionRequest) else "prompt"


def _asked_tokens(request: SamplingFields) -> int | None:
    """What the client asked for; None when it left that open."""
    if not isinstance(request, ChatCompletionRequest):
        return request.max_tokens
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise invalid(
            "Setting 'max_tokens' and 'max_completion_tokens' to different values is not supported;"
            " leave out 'max_tokens'.",
            param="max_tokens",
            code="invalid_value",
        )
    return next(iter(both), None)


def logprobs_of_chat(request: ChatCompletionRequest) -> int | None:
    """Alternatives asked for; None: no log-probabilities at all."""
    return (request.top_logprobs or 0) if request.logprobs else None


def cache_scope(model: str, salt: str | None) -> bytes:
    """Scope of the prefix cache: requests share blocks only within one.

    The model's length stands first, so that no model and salt read like another pair.
    """
    name = model.encode()
    return b"%d:%s%s" % (len(name), name, (salt or "").encode())


def conversation_label(headers: Headers, request: SamplingFields) -> str | None:
    """What the client says belongs together: session headers first, then the body."""
    candidates: Sequence[str | None] = (
        *(headers.get(name) for name in _CONVERSATION_HEADERS),
        request.conversation_id,
        request.prompt_cache_key,
        request.user,
    )
    label = next((candidate for candidate in candidates if candidate), None)
    if label is None or len(label) <= _MAX_LABEL:
        return label
    return hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()


def _top_k(asked: int | None, vocab_size: int) -> int:
    """0, which keeps every token, also for one that would: no number is too large for the wire."""
    return asked if asked is not None and 0 < asked < vocab_size else 0


def _logit_bias(request: SamplingFields, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    bias = request.logit_bias or {}
    if len(bias) > bounds.settings.max_logit_bias:
        raise _above("logit_bias", len(bias), bounds.settings.max_logit_bias)
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= bounds.limits.vocab_size:
            raise _not_in_vocabulary("logit_bias", bounds.limits.vocab_size)
        if not -100 <= value <= 100:
            raise invalid(
                f"Invalid 'logit_bias': expected values in [-100, 100], got {value}.",
                param="logit_bias",
                code="invalid_value",
            )
        result[int(key)] = value
    return tuple(sorted(result.items()))


def _given(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value


def _above(name: str, value: int, maximum: int) -> ApiError:
    return invalid(
        f"Invalid '{name}': expected at most {maximum}, got {value}.",
        param=name,
        code="integer_above_max_value",
    )


def _not_in_vocabulary(name: str, vocab_size: int) -> ApiError:
    return invalid(
        f"Invalid '{name}': expected token ids in [0, {vocab_size}).",
        param=name,
        code="invalid_value",
    )
