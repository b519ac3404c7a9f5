"""Drawing for one row on a CPU: only tokens that can win get logarithms, only likely ones a sort.

Exact: a token outside the head (scaled logit below ``largest - CUT``) wins only if its noise makes
up for the difference to the best noisy value of the head, and the high bits of its hash tell.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.messages import SamplingParams
from worker.ports import Draw
from worker.sampling.filters import Cuts, cut_columns, thresholds
from worker.sampling.noise import gumbel_noise, high_bits, least_high_bits, row_keys

Floats = npt.NDArray[np.float32]

CUT: Final = 10.0
"""Tokens less likely than the likeliest by more than a factor of e**10 are outside the head."""


def draw_row(scores: torch.Tensor, row: Draw, vocabulary: torch.Tensor) -> int:
    """The token a row draws.

    ``scores`` are processed logits, float32 ``[vocab]`` on CPU with a finite largest one;
    ``vocabulary`` is int32 ``arange`` of the same length.
    """
    values = scores.numpy()
    largest = float(values.max())
    keys = row_keys([row], scores.device)
    head = np.flatnonzero(values >= largest - CUT * row.params.temperature)
    if row.is_filtered:
        return _draw_filtered(values, head, keys, row)
    return _draw_plain(values, head, keys, row, vocabulary)


def _draw_plain(
    values: Floats,
    head: npt.NDArray[np.int64],
    keys: torch.Tensor,
    row: Draw,
    vocabulary: torch.Tensor,
) -> int:
    token, best = _best(values, head, keys, row)
    if len(head) == len(values):
        return token
    largest = float(values.max()) / row.params.temperature
    least = least_high_bits(best - (largest - CUT))
    bits = high_bits(keys, vocabulary.unsqueeze(0)).numpy()[0].view(np.uint32)
    rest = np.flatnonzero(bits >= least)
    if not len(rest):
        return token
    other, noisy = _best(values, rest, keys, row)
    return other if noisy > best else token


def _best(
    values: Floats, ids: npt.NDArray[np.int64], keys: torch.Tensor, row: Draw
) -> tuple[int, float]:
    """The best token of ``ids`` and its noisy scaled logit."""
    noise = gumbel_noise(keys, torch.from_numpy(ids.astype(np.int32)).unsqueeze(0))[0].numpy()
    noisy = values[ids].astype(np.float64) / row.params.temperature + noise
    best = int(noisy.argmax())
    return int(ids[best]), float(noisy[best])


def _draw_filtered(
    values: Floats, head: npt.NDArray[np.int64], keys: torch.Tensor, row: Draw
) -> int:
    scaled = values.astype(np.float64) / row.params.temperature
    mass = torch.tensor([[_log_mass(scaled, row.params)]], dtype=torch.float64)
    cuts = Cuts(*map(torch.from_numpy, cut_columns([row.params])))
    limits = thresholds(_descending(scaled[head]), mass, cuts)
    if not limits.certain.item():
        limits = thresholds(_descending(scaled), mass, cuts)
    ids = np.flatnonzero(scaled >= limits.lowest.item())
    return _best(values, ids, keys, row)[0]


def _descending(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(np.sort(values)[::-1].copy()).unsqueeze(0)


def _log_mass(scaled: npt.NDArray[np.float64], params: SamplingParams) -> float:
    """Logsumexp of the row, which top_p alone depends on."""
    if params.top_p >= 1.0:
        return 0.0
    largest = float(scaled.max())
    return largest + math.log(float(np.exp(scaled - largest).sum()))
