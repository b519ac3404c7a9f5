"""Whether a request is taken in: limits of the model, and how many requests may be in flight."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from services.orchestration.api import GenerationRequest, InvalidRequest, ModelLimits, Overloaded

MAX_RETRY_AFTER_S: Final = 30
COMPLETIONS_KEPT: Final = 32


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequest when no worker could ever serve the request."""
    prompt = len(request.tokens)
    if prompt == 0:
        raise InvalidRequest("empty_prompt", "the prompt is empty; expected at least one token")
    if request.n < 1:
        raise InvalidRequest("invalid_n", f"n: expected at least 1, got {request.n}")
    output = request.stop.max_tokens
    if output < 1:
        raise InvalidRequest("invalid_max_tokens", f"max_tokens: expected at least 1, got {output}")
    if prompt + output > limits.max_sequence_tokens:
        raise InvalidRequest(
            "context_length_exceeded",
            f"the maximum context length is {limits.max_sequence_tokens} tokens, but "
            f"{prompt + output} were requested: {prompt} in the prompt and {output} in the output",
        )
    least, most = int(request.tokens.min()), int(request.tokens.max())
    if least < 0 or most >= limits.vocab_size:
        wrong = least if least < 0 else most
        raise InvalidRequest(
            "invalid_token", f"token ids: expected 0 to {limits.vocab_size - 1}, got {wrong}"
        )
    if request.deadline_ms < 1:
        raise InvalidRequest(
            "invalid_deadline", f"deadline_ms: expected at least 1, got {request.deadline_ms}"
        )


class Admission:
    """Counts requests in flight against a limit and says when to come again."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._ended_s: deque[float] = deque(maxlen=COMPLETIONS_KEPT)

    @property
    def in_flight(self) -> int:
        """Accepted requests whose terminal event is not out."""
        return self._in_flight

    def enter(self) -> None:
        """Take one in. Raises Overloaded."""
        if self._in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{self._in_flight} requests are in flight, as many as this server takes",
                self.retry_after_s(),
            )
        self._in_flight += 1

    def leave(self, now_s: float) -> None:
        """One ended."""
        self._in_flight -= 1
        self._ended_s.append(now_s)

    def retry_after_s(self) -> int:
        """Seconds in which about a tenth of what is in flight will have ended at the recent
        rate.
        """
        if len(self._ended_s) < 2:
            return 1
        span_s = self._ended_s[-1] - self._ended_s[0]
        per_request_s = span_s / (len(self._ended_s) - 1)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(per_request_s * self._in_flight / 10)))
