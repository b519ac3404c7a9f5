"""Cutting off unlikely tokens: each filter is a threshold on the logits divided by temperature.

In this order (that of vLLM): min_p keeps tokens at least ``min_p`` times as likely as the
likeliest, top_k keeps the k likeliest, top_p keeps the likeliest tokens until their share of
what the others left reaches ``top_p`` (never fewer than one). Tokens that tie with the last one
kept are kept, so that the result does not depend on how a sort breaks ties.

Only the head of the distribution is sorted; a row that keeps more than the head is sorted whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from worker.messages import SamplingParams

HEAD: Final = 512


@dataclass(frozen=True)
class Thresholds:
    """``lowest`` float64 ``[rows, 1]``: the smallest scaled logit that each row keeps.

    ``certain`` bool ``[rows, 1]``: everything that is kept lies in the head it was computed from.
    """

    lowest: torch.Tensor
    certain: torch.Tensor


def thresholds(
    head: torch.Tensor, log_mass: torch.Tensor, params: Sequence[SamplingParams]
) -> Thresholds:
    """What each row keeps.

    ``head`` is float64 ``[rows, n]``, the largest scaled logits, descending. ``log_mass`` ``[rows,
    1]`` is the logsumexp of the whole row.
    """
    last = head[:, -1:]
    lowest = torch.full_like(log_mass, float("-inf"))
    min_p = _column([p.min_p for p in params], head)
    lowest = torch.where(min_p > 0, head[:, :1] + min_p.log(), lowest)
    ranks = torch.tensor([[p.top_k - 1] for p in params], device=head.device)
    last_kept = head.gather(1, ranks.clamp(0, head.shape[1] - 1))
    lowest = torch.where(ranks >= 0, torch.maximum(lowest, last_kept), lowest)
    top_p = _column([p.top_p for p in params], head)
    kept = head >= lowest
    certain = torch.isinf(lowest) | (lowest > last)
    head_mass = torch.where(kept, head, float("-inf")).logsumexp(1, keepdim=True)
    # Mass of what the other filters left: all of it in the head, or nothing was cut.
    mass = torch.where(torch.isinf(lowest), log_mass, head_mass)
    share = torch.where(kept, (head - mass).exp(), 0.0)
    before = share.cumsum(1) - share
    inside = (before < top_p) & kept
    inside[:, 0] = True
    nucleus = torch.where(inside, head, float("inf")).amin(1, keepdim=True)
    lowest = torch.where(top_p < 1.0, torch.maximum(lowest, nucleus), lowest)
    return Thresholds(lowest, certain & (lowest > last))


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype).to(like.device).unsqueeze(1)
