"""What comes of drawing from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from worker.token_runs import TokenLogprob


class Sampled(NamedTuple):
    """A drawn token. ``logprob`` is there when the draw's parameters ask for it."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class SamplingFailed:
    """No token can be drawn from this row; other rows of the batch are not affected."""

    reason: str


SampleResult = Sampled | SamplingFailed


def reason_of(largest: float) -> str:
    """Why no token can be drawn from logits whose largest is this."""
    return f"expected finite logits, the largest is {largest}: the model's numbers overflowed"


def reason_of_changed(largest: float) -> str:
    """Why none can be drawn from what sound logits have become."""
    return (
        f"expected finite logits, the largest is {largest} after logit_bias and penalties: they "
        "overflow; give smaller ones, and a repetition_penalty nearer to 1"
    )
