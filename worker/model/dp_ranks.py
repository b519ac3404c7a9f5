"""The ranks of an instance under attention data parallelism: they add up like any others, gather
each other's rows, and give what they know of the next tokens to the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from typing_extensions import override

from worker.model.rank_sum import GroupSum
from worker.model.row_exchange import GatheredRows, RowExchange
from worker.model.shard import Shard

LEADER = 0


class DpRanks(GroupSum):
    """A group in which every rank is a dp group of its own. ``begin`` comes before each forward."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._shard = Shard(group.rank(), group.size(), group.size())
        self._layers = GatheredRows(self._shard.rank, self._gather)
        self._drawn = GatheredRows(self._shard.rank, self._gather)
        self._draws: tuple[int, ...] = ()

    def begin(self, rows: Sequence[int], draws: Sequence[int]) -> None:
        """Rows of each rank in this step, and how many of them have wanted logits. The same on all
        ranks.
        """
        self._layers.begin(rows)
        self._drawn.begin(draws)
        self._draws = tuple(draws)

    @property
    @override
    def layer_rows(self) -> RowExchange:
        return self._layers

    @property
    @override
    def drawn_rows(self) -> RowExchange:
        return self._drawn

    def to_leader(self, logits: torch.Tensor) -> torch.Tensor:
        """The wanted logits of all ranks, in order of ranks: float32 ``[sum of draws, vocab]`` on
        the leader, none elsewhere. ``logits`` are this rank's.
        """
        most, rank = max(self._draws), self._shard.rank
        if not most:
            return logits
        padded = logits.new_zeros((most, logits.shape[1]))
        padded[: len(logits)] = logits
        options = distributed.GatherOptions()
        options.rootRank = LEADER
        parts = [torch.empty_like(padded) for _ in self._draws] if rank == LEADER else []
        self._group.gather([parts] if parts else [], [padded], options).wait()
        if rank != LEADER:
            return logits[:0]
        return torch.cat([part[:count] for part, count in zip(parts, self._draws, strict=True)])

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        found = rows.new_empty((self._shard.size * len(rows), rows.shape[1]))
        self._group._allgather_base(found, rows).wait()
        return found
