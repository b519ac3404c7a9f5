"""Rows of per-request state that a drafter keeps beside the pages, such as hidden states.

There are as many rows as sequences may be resident at once, whatever batch sizes graphs were
captured for, and one more: padding rows of a batch all use the dummy row, so none of them ever
writes into a request's row. Deterministic: the lowest free row goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.errors import invariant

Rows = npt.NDArray[np.int32]


class RequestSlotsExhausted(RuntimeError):
    """More requests want a row than there are."""


class RequestSlots:
    """Rows ``0 .. num_sequence_slots - 1`` for requests; ``dummy_row`` is the one behind them.

    ``positions`` int32 ``[num_rows]`` is where each row's request stands. It is seeded from the
    batch at hand, never kept from the request that had the row before; the dummy row stays at 0.
    """

    def __init__(self, num_sequence_slots: int) -> None:
        """``num_sequence_slots``: sequences resident at once, those of a second micro-batch and the
        headroom for preemption included. Raises ValueError below 1.
        """
        if num_sequence_slots < 1:
            raise ValueError(f"expected at least one sequence slot, got {num_sequence_slots}")
        self.num_sequence_slots = num_sequence_slots
        self.positions: Rows = np.zeros(num_sequence_slots + 1, dtype=np.int32)
        self._free = list(range(num_sequence_slots))
        self._rows: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows to allocate, the dummy row included."""
        return self.num_sequence_slots + 1

    @property
    def dummy_row(self) -> int:
        """Where padding rows of a batch write."""
        return self.num_sequence_slots

    @property
    def in_use(self) -> int:
        """Rows that requests have."""
        return len(self._rows)

    def acquire(self, request_id: str) -> int:
        """The row of a request, a fresh one at position 0 if it has none.

        Raises RequestSlotsExhausted.
        """
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                raise RequestSlotsExhausted(
                    f"expected a free row for request {request_id}, all "
                    f"{self.num_sequence_slots} request slots are taken; raise max_batch_size"
                )
            row = self._rows[request_id] = heapq.heappop(self._free)
            self.positions[row] = 0
        return row

    def release(self, request_id: str) -> None:
        """The request has ended. Raises InvariantViolation for one that has no row."""
        invariant(request_id in self._rows, f"request {request_id} has no row to release")
        heapq.heappush(self._free, self._rows.pop(request_id))

    def rows(self, request_ids: Sequence[str | None]) -> Rows:
        """The row of each request of a batch, int32 ``[n]``; the dummy row for None, a padding row.

        Raises KeyError for a request that has none.
        """
        found = (self.dummy_row if one is None else self._rows[one] for one in request_ids)
        return np.fromiter(found, dtype=np.int32, count=len(request_ids))

    def seed(self, rows: Rows, positions: Rows) -> None:
        """The batch at hand stands at ``positions``; both int32 ``[n]``."""
        self.positions[rows] = positions
        self.positions[self.dummy_row] = 0
