"""``pageferry demo``: a short conversation with the service, as any client would have it, and what
it cost.

Speaks plain HTTP with streaming; the figures come from the usage of each answer and from
``/metrics``, so that what is shown is what an operator sees.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TextIO

from services.errors import CommandError
from services.serve import ReadyService
from services.units import format_bytes

QUESTIONS: Final = (
    "What is the capital of France?",
    "And of Italy?",
    "Write one sentence about each of the two cities.",
)
MAX_TOKENS: Final = 96
TIMEOUT_S: Final = 120.0
TRANSFERRED_BYTES: Final = "pageferry_transferred_bytes_total"
TRANSFERRED_BLOCKS: Final = "pageferry_transferred_blocks_total"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one answer took."""

    answer: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_ms: float
    total_ms: float


def chat(service: ReadyService, output: TextIO = sys.stdout) -> None:
    """Hold the conversation. Blocking. Raises CommandError when the service does not answer
    properly."""
    messages: list[dict[str, str]] = []
    for number, question in enumerate(QUESTIONS, start=1):
        output.write(f"\n[{number}] you: {question}\n    {service.model}: ")
        output.flush()
        messages.append({"role": "user", "content": question})
        before = _transferred(service)
        turn = _ask(service, messages, output)
        after = _transferred(service)
        messages.append({"role": "assistant", "content": turn.answer})
        output.write(f"\n    {_figures(turn, before, after)}\n")
        output.flush()


def _figures(turn: Turn, before: tuple[int, int], after: tuple[int, int]) -> str:
    moved_bytes, moved_blocks = after[0] - before[0], after[1] - before[1]
    return (
        f"prompt {turn.prompt_tokens} tokens, {turn.cached_tokens} of them cached; "
        f"transferred {moved_blocks} {'block' if moved_blocks == 1 else 'blocks'}, "
        f"{format_bytes(moved_bytes)}; "
        f"first token {turn.first_token_ms:.0f} ms, "
        f"{turn.completion_tokens} tokens in {turn.total_ms:.0f} ms"
    )


def _ask(service: ReadyService, messages: list[dict[str, str]], output: TextIO) -> Turn:
    started = time.monotonic()
    first_ms = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    body = {
        "model": service.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for event in _stream(service, body):
        if "error" in event:
            raise CommandError(f"the service answered with an error: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if not text:
                continue
            if not parts:
                first_ms = (time.monotonic() - started) * 1_000
            parts.append(text)
            output.write(text.replace("\n", "\n    "))
            output.flush()
    if not usage:
        raise CommandError("the stream ended without usage; the service was interrupted")
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        answer="".join(parts),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        completion_tokens=usage["completion_tokens"],
        first_token_ms=first_ms,
        total_ms=(time.monotonic() - started) * 1_000,
    )


def _stream(service: ReadyService, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a streamed chat completion."""
    connection = http.client.HTTPConnection(service.host, service.port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise CommandError(
                f"the service answered {response.status}: {response.read(2_000).decode()}"
            )
        for line in response:
            payload = line.decode().strip().removeprefix("data: ")
            if payload and payload != "[DONE]" and not payload.startswith(":"):
                yield json.loads(payload)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the connection to the service broke: {error!r}") from error
    finally:
        connection.close()


def _transferred(service: ReadyService) -> tuple[int, int]:
    """Bytes and blocks that workers have sent each other so far."""
    connection = http.client.HTTPConnection(service.host, service.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the connection to the service broke: {error!r}") from error
    finally:
        connection.close()
    return _sum(text, TRANSFERRED_BYTES), _sum(text, TRANSFERRED_BLOCKS)


def _sum(metrics: str, name: str) -> int:
    # Both ends count what was transferred; here it counts once, where it arrived.
    pattern = rf'^{name}\{{instance="generation[^}}]*\}} (\S+)'
    return int(sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE)))
