"""The attention of a dummy request: one padding row of a rank that has none of its own in a step.

Such a rank takes part in the MLPs of the others. Its row is in no sequence: it reads no page,
writes none, and nobody counts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from worker.model.attention import AttentionStep, Target

NO_SLOT = -1


class IdleStep(AttentionStep):
    """``pages`` are those of the model's layers, for their shape alone."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = tuple(pages)
        device = self._pages[0].device
        self._slots = torch.full((1,), NO_SLOT, dtype=torch.int64, device=device)
        self._offsets = torch.zeros_like(self._slots)

    @override
    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return query.new_zeros(query.shape)

    @override
    def of_drawn(self) -> IdleStep:
        return self

    @override
    def target(self, index: int) -> Target:
        return Target(self._pages[index], self._slots, self._offsets, None)

    @override
    def attend_stored(
        self, index: int, query: torch.Tensor, key_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return query.new_zeros(query.shape)
