"""What a client asks to be continued, as values the tokenizer takes.

A completion prompt is text or token ids, one or several; a conversation is a list of messages whose
contents are text. All forms end up as the same kinds of value here, so that everything after this
file has one path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import numpy as np

from services.http.errors import ApiError, invalid
from services.http.schemas import ChatCompletionRequest
from services.orchestration.api import ModelLimits
from services.text.chat_template import Conversation
from services.text.tokenizer import TokenIds, TooManyTokens

Prompt = str | TokenIds

_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal", "input_text": "text"}
"""Kinds of content parts that are text, with the key it stands under."""


def count_prompts(value: Any) -> int:
    """How many prompts ``value`` is, without a look at all of it. Raises ApiError."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, list):
        raise _bad_prompt("expected a string, a list of strings, token ids or a list of token ids")
    if not value:
        raise _bad_prompt("expected at least one token, got an empty list")
    return len(value) if isinstance(value[0], str | list) else 1


def read_prompts(value: Any, limits: ModelLimits) -> list[Prompt]:
    """Prompts of ``value``, which :func:`count_prompts` has seen, in order, none of them empty.

    Raises ApiError, or TooManyTokens for ids that the model cannot hold.
    """
    if isinstance(value, str):
        return [_text(value)]
    if isinstance(value[0], str | list):
        return [_one_of_several(item, limits) for item in value]
    return [_ids(value, limits)]


def _one_of_several(item: Any, limits: ModelLimits) -> Prompt:
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, list):
        return _ids(item, limits)
    raise _bad_prompt("expected every prompt to be a string or a list of token ids")


def _text(value: str) -> str:
    if not value:
        raise _bad_prompt("expected at least one character, got an empty string")
    return value


def _ids(value: list[Any], limits: ModelLimits) -> TokenIds:
    if not value:
        raise _bad_prompt("expected at least one token, got an empty list")
    if len(value) > limits.max_sequence_tokens:
        raise TooManyTokens(len(value), limits.max_sequence_tokens)
    if not _are_ints(value):
        raise _bad_prompt("expected token ids to be integers")
    if min(value) < 0 or max(value) >= limits.vocab_size:
        raise _bad_prompt(f"expected token ids in [0, {limits.vocab_size})")
    return np.asarray(value, dtype=np.int32)


def _are_ints(value: list[Any]) -> TypeGuard[list[int]]:
    return set(map(type, value)) == {int}  # exact: True is no token


def _bad_prompt(what: str) -> ApiError:
    return invalid(f"Invalid 'prompt': {what}.", param="prompt", code="invalid_prompt")


def read_conversation(request: ChatCompletionRequest, body: Mapping[str, Any]) -> Conversation:
    """The conversation of a checked request; keys that only a template knows are kept.

    Raises ApiError.
    """
    messages = [_message(message, index) for index, message in enumerate(body["messages"])]
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return Conversation(
        messages=messages,
        tools=request.tools or None,
        documents=request.documents or None,
        add_generation_prompt=request.add_generation_prompt is not False,
        variables=variables,
    )


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    role = message["role"]
    return {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _content(message, f"messages[{index}].content"),
    }


def _content(message: Mapping[str, Any], param: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant":
            return None
        raise invalid(
            f"Invalid value for '{param}': expected a string or a list of parts, got null.",
            param=param,
            code="invalid_type",
        )
    if not isinstance(content, list):
        raise invalid(
            f"Invalid value for '{param}': expected a string or a list of parts.",
            param=param,
            code="invalid_type",
        )
    return "\n".join(_part(part, f"{param}[{at}]") for at, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise invalid(
            f"Invalid value for '{param}': expected a part of type text, got {kind!r}; this model"
            " reads text only.",
            param=param,
            code="invalid_value",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(
            f"Invalid value for '{param}.{key}': expected a string.",
            param=f"{param}.{key}",
            code="invalid_type",
        )
    return text
