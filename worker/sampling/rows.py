"""One row to draw from, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.messages import SamplingParams, TokenLogprob

GREEDY_TEMPERATURE: Final = 1e-5
"""Below this, dividing by the temperature says nothing that argmax does not."""


@dataclass(frozen=True, eq=False)
class SampleRow:
    """How to draw one token. Nothing else decides which token a row of logits gives.

    ``output_index`` counts the output tokens before this one; with the seed and the choice it is
    the whole key of the noise. ``banned`` tokens are never drawn.
    """

    params: SamplingParams
    choice: int
    output_index: int
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    banned: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken; no noise."""
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Something is added to or taken from the model's logits before temperature."""
        params = self.params
        return bool(
            self.banned
            or params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

    @property
    def is_filtered(self) -> bool:
        """Unlikely tokens are cut off."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True)
class Sampled:
    """A drawn token. ``logprob`` is there when the row's parameters ask for it."""

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
