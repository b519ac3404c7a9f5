"""Rows of several dp groups in one MLP: gathered before it, taken out again after it.

Under attention data parallelism each rank has rows of its own and a part of every MLP. So a rank
computes its part for the rows of all, the parts are summed as under tensor parallelism, and each
rank goes on with its own rows. How many rows each rank has is told at the beginning of a step,
alike on all of them: nothing here depends on what one rank alone knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from typing_extensions import override


class RowExchange(Protocol):
    """Rows ``[T, hidden]`` of this rank, and those of all."""

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks: ``[ranks * most, hidden]``, zeros where a rank has fewer than the
        most.
        """

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of them, without a copy."""


class OwnRows(RowExchange):
    """All ranks have the same rows."""

    @override
    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @override
    def own(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


OWN_ROWS: Final = OwnRows()

Gather = Callable[[torch.Tensor], torch.Tensor]
"""``[n, width]`` of every rank, equally many, to ``[ranks * n, width]`` in order of ranks."""


class GatheredRows(RowExchange):
    """Every rank has rows of its own."""

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank = rank
        self._gather = gather
        self._counts: tuple[int, ...] = ()

    def begin(self, counts: Sequence[int]) -> None:
        """How many rows each rank has from now on."""
        self._counts = tuple(counts)

    @override
    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        count, most = self._counts[self._rank], max(self._counts)
        if len(rows) != count:
            raise ValueError(f"expected the {count} rows of this rank, got {len(rows)}")
        if not most:
            return rows
        if count < most:
            padded = rows.new_zeros((most, rows.shape[1]))
            padded[:count] = rows
            rows = padded
        return self._gather(rows.contiguous())

    @override
    def own(self, rows: torch.Tensor) -> torch.Tensor:
        start = self._rank * max(self._counts)
        return rows[start : start + self._counts[self._rank]]


class GatheredModule(torch.nn.Module):
    """An MLP of transformers, over the rows of all ranks: ``[1, T, hidden]`` of this rank in and
    out.
    """

    def __init__(self, mlp: torch.nn.Module, rows: RowExchange) -> None:
        super().__init__()
        self.mlp = mlp
        self._rows = rows

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mlp(self._rows.gathered(hidden[0]).unsqueeze(0))
        return self._rows.own(found[0]).unsqueeze(0)
