"""Which slots of one tier of a pool group are free, as maximal free runs.

Prefers consecutive ascending slots: a caller that extends a sequence passes its last slot and gets
the following ones when they are free, so that transfers merge into few long messages. Otherwise it
takes from the longest run. Deterministic; costs follow the number of runs, not of slots.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvcache_core.errors import invariant

Slots = npt.NDArray[np.int32]
MANY_RUNS = 8
"""More are merged with each other before they are merged with what is free: sorting costs less."""
Rows = npt.NDArray[np.intp]
Numbers = Slots | Rows


def rows_of(numbers: Numbers) -> Rows:
    """``numbers`` as an index of arrays: numpy converts any other integers anew at each use."""
    return numbers.astype(np.intp, copy=False)


def runs_of(numbers: Numbers) -> list[tuple[int, int]]:
    """Maximal runs of consecutive numbers in ``numbers``, of which there is one at least, as
    half-open ranges of places.
    """
    lasts: list[int] = (numbers[1:] - numbers[:-1] != 1).nonzero()[0].tolist()
    return list(pairwise([0, *(last + 1 for last in lasts), len(numbers)]))


class SlotAllocator:
    """Free slots of ``[first, first + num_slots)``."""

    __slots__ = ("_ends", "_heap", "_starts", "free", "num_slots")

    def __init__(self, num_slots: int, first: int = 0) -> None:
        self.num_slots = num_slots
        self.free = num_slots
        self._starts: dict[int, int] = {}
        """Start of each free run to its end."""
        self._ends: dict[int, int] = {}
        """End of each free run to its start."""
        self._heap: list[tuple[int, int]] = []
        """(-length, start) of runs; entries that match no run any more are skipped."""
        if num_slots:
            self._add(first, first + num_slots)

    def take(self, count: int, after: int | None = None) -> Slots:
        """``count`` slots, ascending runs, starting behind slot ``after`` where that is free.

        The caller has checked ``free``; taking more is an InvariantViolation.
        """
        invariant(count <= self.free, f"asked for {count} slots, {self.free} are free")
        taken = np.empty(count, dtype=np.int32)
        done = 0
        start = None if after is None else after + 1
        while done < count:
            if start is None or start not in self._starts:
                start = self._longest()
            end = min(self._starts[start], start + count - done)
            self._cut(start, end)
            taken[done : done + end - start] = np.arange(start, end, dtype=np.int32)
            done += end - start
            start = None
        self.free -= count
        return taken

    def give(self, slots: Numbers) -> None:
        """Return slots, each once, in any order; merges with the free runs around them."""
        if not len(slots):
            return
        self.free += len(slots)
        rising = slots[::-1]  # pages come deepest block first
        runs = runs_of(rising)
        if len(runs) > MANY_RUNS:
            rising = slots.copy()
            rising.sort()
            runs = runs_of(rising)
        for first, end in runs:
            start = rising.item(first)
            self._give_run(start, start + end - first)

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as half-open ranges, ascending. For checks."""
        return sorted(self._starts.items())

    def _give_run(self, start: int, end: int) -> None:
        invariant(start not in self._starts, f"slot {start} is free already")
        first = self._ends.pop(start, start)
        if first != start:
            del self._starts[first]
        last = self._starts.pop(end, end)
        if last != end:
            del self._ends[last]
        self._add(first, last)

    def _add(self, start: int, end: int) -> None:
        self._starts[start] = end
        self._ends[end] = start
        heapq.heappush(self._heap, (start - end, start))
        if len(self._heap) > 4 * len(self._starts) + 64:
            self._heap = [(first - last, first) for first, last in self._starts.items()]
            heapq.heapify(self._heap)

    def _cut(self, start: int, end: int) -> None:
        """Take ``[start, end)`` from the front of the run at ``start``."""
        last = self._starts.pop(start)
        del self._ends[last]
        if end < last:
            self._add(end, last)

    def _longest(self) -> int:
        while True:
            negative_length, start = self._heap[0]
            if self._starts.get(start) == start - negative_length:
                return start
            heapq.heappop(self._heap)
