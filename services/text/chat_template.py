"""Chat templates as Hugging Face models carry them, rendered in a sandbox.

Templates come with the model and are untrusted code: they run in jinja's immutable sandbox and see
plain JSON values only. What they may rely on is what transformers gives them: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``break`` and ``continue``, the ``generation``
tag, trimmed blocks, and messages without keys whose value is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

JsonObject = Mapping[str, Any]

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplateError(ValueError):
    """The template refuses these messages, or cannot render them: an error of the request."""


class InvalidTemplate(ValueError):
    """The template itself cannot be compiled: an error of the model."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template is rendered with. Contents are strings, null or absent."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    documents: Sequence[JsonObject] | None = None
    add_generation_prompt: bool = True
    variables: JsonObject = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here its content is rendered as it
    is.
    """

    tags = {"generation"}  # noqa: RUF012  declared by jinja as an instance attribute

    @override
    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering is safe from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` maps names such as ``bos_token`` to text. Raises InvalidTemplate."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidTemplate(
                f"chat template of the model does not compile: {error}"
            ) from error

    def render(self, conversation: Conversation) -> str:
        """Text of the prompt. Raises ChatTemplateError with the template's own words."""
        clash = _RESERVED & conversation.variables.keys()
        if clash:
            raise ChatTemplateError(
                f"chat template variables: {', '.join(sorted(clash))} have parameters of their own"
            )
        messages = [_normalized(message) for message in conversation.messages]
        try:
            return self._render(messages, conversation)
        except ChatTemplateError:
            if all("content" in message for message in messages):
                raise
        # Many templates take `content` for granted, which null removes: give them an empty one.
        return self._render([{"content": "", **message} for message in messages], conversation)

    def _render(self, messages: list[dict[str, Any]], conversation: Conversation) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **conversation.variables,
                    "messages": messages,
                    "tools": conversation.tools,
                    "documents": conversation.documents,
                    "add_generation_prompt": conversation.add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses this: {error}") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OverflowError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error


def _normalized(message: JsonObject) -> dict[str, Any]:
    """A message as templates expect it: no nulls, reasoning under its usual names, tool arguments
    as objects.
    """
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[key] for key in _REASONING_FIELDS if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return result


def _with_parsed_arguments(call: Any) -> Any:
    """The API carries arguments of a call as JSON text; templates print them with ``tojson``."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  the signature that templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)
