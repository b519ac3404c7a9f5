"""Drawing for many rows at once in torch: what a GPU is good at. float64 throughout.

Nothing here waits for the device: what has to be known of the rows is uploaded, tokens stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.ports import Draw
from worker.sampling.filters import Cuts, cut_columns, thresholds
from worker.sampling.noise import gumbel_noise, key_rows

MOST_ROWS: Final = 32
"""Rows at a time: each takes some 40 bytes a token of the vocabulary while it is drawn."""


@dataclass(frozen=True)
class Group:
    """Rows that are drawn in the same way, none of them greedy. ``indices`` are into the step's."""

    indices: tuple[int, ...]
    rows: tuple[Draw, ...]

    @property
    def columns(self) -> list[npt.NDArray[Any]]:
        """What the device must know of them."""
        params = [row.params for row in self.rows]
        return [
            np.array(self.indices, np.int64),
            np.array([[p.temperature] for p in params], np.float64),
            key_rows(self.rows)[:, :, None],
            *cut_columns(params),
        ]

    @property
    def is_filtered(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return self.rows[0].is_filtered

    @property
    def head(self) -> int | None:
        """How many of the largest logits tell what is kept; None: all of them, since nobody knows
        beforehand how far a nucleus reaches.
        """
        if self.rows[0].params.top_p < 1.0:
            return None
        return max(1, *(row.params.top_k for row in self.rows))


def group_rows(rows: Sequence[Draw]) -> list[Group]:
    """The rows that are not greedy, by how they are drawn, few enough at a time."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, row in enumerate(rows):
        if not row.is_greedy:
            kinds.setdefault((row.is_filtered, row.params.top_p < 1.0), []).append(index)
    parts = [
        indices[begin : begin + MOST_ROWS]
        for indices in kinds.values()
        for begin in range(0, len(indices), MOST_ROWS)
    ]
    return [Group(tuple(part), tuple(rows[i] for i in part)) for part in parts]


def draw_group(scores: torch.Tensor, group: Group, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 ``[rows]``: a token a row of processed logits ``scores`` ``[rows, vocab]``.

    ``columns`` are the group's, on the scores' device.
    """
    _, temperature, keys, *cuts = columns
    scaled = scores.double() / temperature
    vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    noisy = gumbel_noise(keys, vocabulary.unsqueeze(0)).add_(scaled)
    if group.is_filtered:
        size = scores.shape[1] if group.head is None else min(group.head, scores.shape[1])
        head = _largest(scores, size).double() / temperature
        limits = thresholds(head, scaled.logsumexp(1, keepdim=True), Cuts(*cuts))
        noisy = noisy.masked_fill_(scaled < limits.lowest, float("-inf"))
    return noisy.argmax(dim=1)


def _largest(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Each row's largest values, descending."""
    if size == scores.shape[1]:
        return scores.sort(dim=1, descending=True).values
    return scores.topk(size, dim=1).values
