"""Cutting off unlikely tokens: each filter is a threshold on the logits divided by temperature.

In this order (that of vLLM): min_p keeps tokens at least ``min_p`` times as likely as the
likeliest, top_k keeps the k likeliest, top_p keeps the likeliest tokens until their share of
what the others left reaches ``top_p`` (never fewer than one). Tokens that tie with the last one
kept are kept, so that the result does not depend on how a sort breaks ties.

Where only the head of the distribution is sorted, a row that keeps more has to be sorted whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.messages import SamplingParams


@dataclass(frozen=True)
class Cuts:
    """The filters of some rows, each ``[rows, 1]``: ``min_p`` and ``top_p`` float64, ``rank`` int64
    of the last token that top_k keeps, -1 where it keeps all.
    """

    min_p: torch.Tensor
    rank: torch.Tensor
    top_p: torch.Tensor


@dataclass(frozen=True)
class Thresholds:
    """``lowest`` float64 ``[rows, 1]``: the smallest scaled logit that each row keeps.

    ``certain`` bool ``[rows, 1]``: everything that is kept lies in the head it was computed from.
    """

    lowest: torch.Tensor
    certain: torch.Tensor


def cut_columns(params: Sequence[SamplingParams]) -> list[npt.NDArray[Any]]:
    """The arrays of :class:`Cuts`, on the host."""
    return [
        np.array([[p.min_p] for p in params], np.float64),
        np.array([[p.top_k - 1] for p in params], np.int64),
        np.array([[p.top_p] for p in params], np.float64),
    ]


def thresholds(head: torch.Tensor, log_mass: torch.Tensor, cuts: Cuts) -> Thresholds:
    """What each row keeps.

    ``head`` is float64 ``[rows, n]``, the largest scaled logits, descending. ``log_mass`` ``[rows,
    1]`` is the logsumexp of the whole row. min_p and top_k are exact if the head has as many as
    top_k keeps; top_p is where the row is certain or the head is all of it.
    """
    last = head[:, -1:]
    lowest = torch.full_like(log_mass, float("-inf"))
    lowest = torch.where(cuts.min_p > 0, head[:, :1] + cuts.min_p.log(), lowest)
    last_kept = head.gather(1, cuts.rank.clamp(0, head.shape[1] - 1))
    lowest = torch.where(cuts.rank >= 0, torch.maximum(lowest, last_kept), lowest)
    kept = head >= lowest
    certain = torch.isinf(lowest) | (lowest > last)
    head_mass = torch.where(kept, head, float("-inf")).logsumexp(1, keepdim=True)
    # Mass of what the other filters left: all of it in the head, or nothing was cut.
    mass = torch.where(torch.isinf(lowest), log_mass, head_mass)
    share = torch.where(kept, (head - mass).exp(), 0.0)
    before = share.cumsum(1) - share
    inside = (before < cuts.top_p) & kept
    inside[:, 0] = True
    nucleus = torch.where(inside, head, float("inf")).amin(1, keepdim=True)
    lowest = torch.where(cuts.top_p < 1.0, torch.maximum(lowest, nucleus), lowest)
    return Thresholds(lowest, certain & (lowest > last))
