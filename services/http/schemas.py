"""Request bodies of the API.

Every documented OpenAI field is known here: it has a typed field, or it stands in a table of fields
that are refused by name unless their value asks for nothing. Types are strict (``"7"`` is no
number). Fields nobody documents are ignored, as other OpenAI-compatible servers do, so that clients
with additions of their own still work; only their length is bounded (:mod:`services.http.body`).
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.http.errors import ApiError, invalid

RequestT = TypeVar("RequestT", bound="SamplingFields")

ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list of which the first bad item is told: an error for each would cost more than all else."""
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Label = Annotated[str, Field(max_length=512)]

_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known parameters that are not supported, with the values besides null that ask for nothing."""

_REFUSED_FOR_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    "add_special_tokens": (False,),
    "function_call": ("none",),
    "functions": ([],),
}
_REFUSED_FOR_COMPLETIONS: Final[Mapping[str, tuple[object, ...]]] = {"add_special_tokens": (True,)}


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None


class SamplingFields(_Body):
    """What chat completions and completions have in common, OpenAI's fields first."""

    model: str = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1)
    stop: str | Items[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = None
    conversation_id: Label | None = None
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Far beyond what anybody uses, and far from what takes float32 logits to infinity."""
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Items[int] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``. ``prompt`` is read by :mod:`services.http.prompts`."""

    prompt: Any = None
    logprobs: int | None = Field(default=None, ge=0)
    best_of: int | None = Field(default=None, ge=1)


class ChatMessage(_Body):
    """What is checked of a message; templates get the message as it came."""

    role: Role
    content: Any = None
    tool_calls: Items[dict[str, Any]] | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check the body of a completion request. Raises ApiError."""
    _refuse_unsupported(body, _REFUSED, _REFUSED_FOR_COMPLETIONS)
    request = _validate(CompletionRequest, body)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", request.best_of, "leave it out or make it equal to n")
    return request


def parse_chat(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Check the body of a chat request. Raises ApiError."""
    _refuse_unsupported(body, _REFUSED, _REFUSED_FOR_CHAT)
    request = _validate(ChatCompletionRequest, body)
    if request.tools and request.tool_choice != "none":
        raise _unsupported(
            "tools",
            "a list of tools",
            'tool calls are not recognised in answers; send tool_choice "none" to show the tools to'
            " the model only",
        )
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise invalid(
            "'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice"
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    return request


def _validate(model: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _of_validation(error) from None
    if request.stream_options is not None and not request.stream:
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    return request


def _of_validation(error: ValidationError) -> ApiError:
    """The first problem, under the name that the client gave the value."""
    problems = error.errors(include_url=False, include_context=False)
    where = _path(problems[0]["loc"])
    # Every branch of a union complains; the one that got furthest is the one that was meant.
    branches = [each for each in problems if _path(each["loc"])[: len(where)] == where]
    first = max(branches, key=lambda each: len(_path(each["loc"])))
    param = ""
    for part in _path(first["loc"]):
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if first["type"] == "missing":
        return invalid(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    given = _shown(first["input"])
    return invalid(
        f"Invalid value for '{param}': {first['msg']}, got {given}.",
        param=param,
        code="invalid_type" if first["type"].endswith("_type") else "invalid_value",
    )


def _path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where a value stands in the body, without the type names that mark branches of a union."""
    return tuple(part for part in location if part not in _TYPE_NAMES)


_TYPE_NAMES: Final = frozenset({"str", "list[str]", "dict[str,any]", "int", "float", "bool"})


_REPR: Final = Repr()
"""Looks at no more of a value than is shown."""
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 128
_REPR.maxlist = _REPR.maxdict = 16


def _shown(value: object) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _refuse_unsupported(body: Mapping[str, Any], *tables: Mapping[str, tuple[object, ...]]) -> None:
    for table in tables:
        for name in table.keys() & body.keys():
            value = body[name]
            if value is not None and value not in table[name]:
                raise _unsupported(name, value, "leave it out")


def _unsupported(name: str, value: object, advice: str) -> ApiError:
    return invalid(
        f"Unsupported parameter: '{name}' with {_shown(value)} is not supported by this server;"
        f" {advice}.",
        param=name,
        code="unsupported_parameter",
    )
