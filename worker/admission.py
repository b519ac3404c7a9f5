"""What a worker accepts: every reason to refuse a request, with a stable code and both values in
the message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer.wire import FrameError, unpack_ints
from worker.messages import Generate, Prefill, SamplingParams

MAX_LOGPROBS = 64


class Rejected(ValueError):
    """A request that no worker of this model would accept. ``code`` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one sequence may be."""

    max_sequence_tokens: int
    vocab_size: int
    max_choices: int


@dataclass(frozen=True, eq=False, slots=True)
class Checked:
    """The parts of a request that had to be decoded to be checked."""

    prompt: npt.NDArray[np.int32]
    emitted: tuple[npt.NDArray[np.int32], ...]
    """One array a choice."""
    output_limit: int


def check(message: Prefill | Generate, bounds: Bounds) -> Checked:
    """Decode and check a request. Raises Rejected."""
    prompt = _tokens(message.tokens, "prompt", bounds)
    if len(prompt) == 0:
        raise Rejected("empty_prompt", "the prompt has no tokens; give at least one")
    if len(prompt) >= bounds.max_sequence_tokens:
        raise Rejected(
            "context_length_exceeded",
            f"this worker holds at most {bounds.max_sequence_tokens} tokens of prompt and output, "
            f"and the prompt has {len(prompt)}; shorten it",
        )
    if not 1 <= message.n <= bounds.max_choices:
        raise Rejected("invalid_n", f"n: expected 1 to {bounds.max_choices}, got {message.n}")
    if message.stop.max_tokens < 1:
        raise Rejected(
            "invalid_max_tokens", f"max_tokens: expected 1 or more, got {message.stop.max_tokens}"
        )
    if message.deadline_ms < 1:
        raise Rejected(
            "invalid_deadline", f"deadline_ms: expected 1 or more, got {message.deadline_ms}"
        )
    _check_sampling(message.sampling, bounds)
    return Checked(
        prompt=prompt,
        emitted=_emitted(message, len(prompt), bounds),
        output_limit=min(message.stop.max_tokens, bounds.max_sequence_tokens - len(prompt)),
    )


def _emitted(
    message: Prefill | Generate, prompt_tokens: int, bounds: Bounds
) -> tuple[npt.NDArray[np.int32], ...]:
    nothing: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
    if not isinstance(message, Generate):
        return (nothing,) * message.n
    if any(not 0 <= choice < message.n for choice in message.finished):
        raise Rejected(
            "invalid_choice",
            f"finished: expected choices below {message.n}, got {message.finished}",
        )
    if not message.emitted:
        return (nothing,) * message.n
    if len(message.emitted) != message.n:
        raise Rejected(
            "invalid_emitted",
            f"emitted: expected {message.n} arrays, one a choice, got {len(message.emitted)}",
        )
    emitted = tuple(_tokens(part, "emitted", bounds) for part in message.emitted)
    longest = max(len(part) for part in emitted)
    if prompt_tokens + longest > bounds.max_sequence_tokens:
        raise Rejected(
            "context_length_exceeded",
            f"this worker holds at most {bounds.max_sequence_tokens} tokens of prompt and output, "
            f"and prompt and emitted tokens are {prompt_tokens + longest}",
        )
    return emitted


def _tokens(data: bytes, what: str, bounds: Bounds) -> npt.NDArray[np.int32]:
    try:
        tokens = unpack_ints(data)
    except FrameError as error:
        raise Rejected("invalid_tokens", f"{what}: {error}") from error
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < bounds.vocab_size):
        raise Rejected(
            "invalid_tokens",
            f"{what}: expected token ids of 0 to {bounds.vocab_size - 1}, "
            f"got {int(tokens.min())} to {int(tokens.max())}",
        )
    return tokens


def _check_sampling(params: SamplingParams, bounds: Bounds) -> None:
    ranges = (
        ("temperature", params.temperature, 0.0, math.inf),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("top_k", params.top_k, 0, math.inf),
        ("seed", params.seed, 0, 2**63 - 1),
        ("presence_penalty", params.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", params.frequency_penalty, -math.inf, math.inf),
        ("repetition_penalty", params.repetition_penalty, 0.0, math.inf),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise Rejected("invalid_sampling", f"{name}: expected {low} to {high}, got {value}")
    if params.repetition_penalty == 0:
        raise Rejected("invalid_sampling", "repetition_penalty: expected more than 0, got 0")
    for token, bias in params.logit_bias:
        if not 0 <= token < bounds.vocab_size or math.isnan(bias):
            raise Rejected(
                "invalid_sampling",
                f"logit_bias: expected token ids of 0 to {bounds.vocab_size - 1} with a number, "
                f"got {token}: {bias}",
            )
