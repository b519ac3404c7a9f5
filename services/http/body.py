"""Reads a JSON object from a request body, or says what is wrong with it.

Nothing malformed reaches a schema: size, arrival time, content type, encoding, depth, NaN and lone
surrogates are checked here, before or while the bytes are parsed; then how many items there are,
because a schema looks at each on the event loop that all requests share.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from services.http.disconnect import ClientGone
from services.http.errors import ApiError, invalid
from services.http.settings import HttpSettings


async def read_json_object(request: Request, settings: HttpSettings) -> dict[str, Any]:
    """The body of ``request``. Raises ApiError, or ClientGone when it never arrives in full."""
    _check_headers(request, settings.max_body_bytes)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"request body: expected it within {settings.body_timeout_s:g} s; send it faster",
            code="request_timeout",
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise invalid(
            "We could not parse the JSON body of your request. (HINT: This likely means you aren't"
            f" using your HTTP library correctly. Expected a JSON object in UTF-8: {error})",
            code="invalid_json",
        ) from None
    if not isinstance(value, dict):
        raise invalid(
            f"request body: expected a JSON object, got {_kind(value)}", code="invalid_json"
        )
    _check_items(value, settings.max_items)
    return value


def _check_items(body: dict[str, Any], most: int) -> None:
    """The prompts of a completion are bounded by what the model holds, not here."""
    for name, value in body.items():
        if name == "prompt" or not isinstance(value, list | dict):
            continue
        if len(value) > most:
            raise _too_many_items(name, len(value), most)
        if name == "messages":
            _check_messages(value, most)


def _check_messages(messages: Any, most: int) -> None:
    """Items within the messages, counted over all of them."""
    if not isinstance(messages, list):
        return
    total = 0
    for place, message in enumerate(messages):
        for key, value in message.items() if isinstance(message, dict) else ():
            if isinstance(value, list | dict):
                total += len(value)
                if total > most:
                    raise _too_many_items(f"messages[{place}].{key}", total, most)


def _too_many_items(name: str, count: int, most: int) -> ApiError:
    return invalid(
        f"Invalid '{name}': expected at most {most} items, got {count}.",
        param=name,
        code="too_many_items",
    )


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media_type.lower() != "application/json" and not media_type.lower().endswith("+json"):
        raise invalid(
            f"content-type: expected application/json, got {media_type!r}; set the header",
            code="invalid_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise invalid(
            f"content-encoding: expected none, got {encoding!r}; send the body uncompressed",
            code="invalid_content_encoding",
        )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"request body: expected at most {max_bytes} bytes; shorten it", code="body_too_large"
    )


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
