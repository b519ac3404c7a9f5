"""Closed-loop load on an OpenAI-style endpoint: ``concurrency`` clients, each sends its next
request when the last ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx


@dataclass
class Sample:
    """One request: milliseconds to the first token, gaps between tokens, tokens of answer and
    prompt as the server counts them.
    """

    ttft_ms: float
    itl_ms: list[float]
    output_tokens: int
    total_s: float
    prompt_tokens: int


@dataclass
class LoadResult:
    """All requests of one closed loop and its wall time."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return sum(s.output_tokens for s in self.samples) / self.wall_s


async def one(client: httpx.AsyncClient, model: str, prompt: str, output_tokens: int) -> Sample:
    """Send one streaming chat request of exactly ``output_tokens`` and time its tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    stamps: list[float] = []
    counted = prompt_tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(
                f"expected 200, got {response.status_code}: {(await response.aread()).decode()}"
            )
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
                prompt_tokens = event["usage"]["prompt_tokens"]
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                stamps.append(time.perf_counter())
    if counted != output_tokens or not stamps:
        raise RuntimeError(
            f"expected {output_tokens} tokens, the server counted {counted} in {len(stamps)} deltas"
        )
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    total_s = time.perf_counter() - started
    return Sample((stamps[0] - started) * 1e3, gaps, counted, total_s, prompt_tokens)


async def run(
    url: str, model: str, prompts: Sequence[str], concurrency: int, output_tokens: int
) -> LoadResult:
    """Send every prompt once, ``concurrency`` at a time."""
    result = LoadResult()
    waiting = list(reversed(prompts))
    # Reading all certificates takes 0.1 s, for nothing where none is checked.
    is_secure = url.startswith("https:")
    async with httpx.AsyncClient(base_url=url, timeout=600, verify=is_secure) as client:

        async def loop() -> None:
            while waiting:
                result.samples.append(await one(client, model, waiting.pop(), output_tokens))

        started = time.perf_counter()
        await asyncio.gather(*(loop() for _ in range(concurrency)))
        result.wall_s = time.perf_counter() - started
    return result
