"""Requests to a service whose workers are killed, and the judgement of their streams."""

from __future__ import annotations

import time
from typing import Any, Final

from tests.e2e.cases import prose
from tests.e2e.client import Streamed
from tests.e2e.conftest import Judge
from worker.messages import SamplingParams

OUTPUT_TOKENS: Final = 24
RESTART_S: Final = 60.0


def request_of(number: int, prompt_tokens: int) -> dict[str, Any]:
    """Greedy and drawn requests in turn; no two share a prefix."""
    return {
        "prompt": f"{number}. " + prose(prompt_tokens),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": float(number % 2),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": str(time.monotonic_ns()),
    }


def assert_complete(judge: Judge, number: int, body: dict[str, Any], got: Streamed) -> None:
    """The stream has every token once and equals the oracle. Asks the service nothing, so that it
    may be done while a worker restarts.
    """
    assert got.error is None, got.error
    assert got.done
    output = got.choices[0].token_ids
    assert len(output) == OUTPUT_TOKENS
    params = SamplingParams(temperature=body["temperature"], seed=body["seed"])
    report = judge(body["prompt"], output, params)
    assert report.ok, f"request {number}: {report}"
