"""Which slots of a pool group are free, as maximal free runs.

Prefers consecutive ascending slots: a caller that extends a sequence passes its last slot and gets
the following ones when they are free, so that transfers merge into few long messages. Otherwise it
takes from the longest run. Deterministic; every operation is O(log n) amortised.
"""

from __future__ import annotations

import heapq

from kvcache_core.errors import invariant


class SlotAllocator:
    """Free slots of ``[0, num_slots)``."""

    __slots__ = ("_ends", "_heap", "_starts", "free", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = num_slots
        self._starts: dict[int, int] = {}
        """Start of each free run to its end."""
        self._ends: dict[int, int] = {}
        """End of each free run to its start."""
        self._heap: list[tuple[int, int]] = []
        """(-length, start) of runs; entries that match no run any more are skipped."""
        if num_slots:
            self._add(0, num_slots)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` slots, ascending runs, starting behind slot ``after`` where that is free.

        The caller has checked ``free``; taking more is an InvariantViolation.
        """
        invariant(count <= self.free, f"asked for {count} slots, {self.free} are free")
        taken: list[int] = []
        start = None if after is None else after + 1
        while len(taken) < count:
            if start is None or start not in self._starts:
                start = self._longest()
            end = min(self._starts[start], start + count - len(taken))
            self._cut(start, end)
            taken.extend(range(start, end))
            start = None
        self.free -= count
        return taken

    def give(self, slot: int) -> None:
        """Return one slot; merges with the free runs around it."""
        start = self._ends.pop(slot, slot)
        if start != slot:
            del self._starts[start]
        end = self._starts.pop(slot + 1, slot + 1)
        if end != slot + 1:
            del self._ends[end]
        self._add(start, end)
        self.free += 1

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as half-open ranges, ascending. For checks."""
        return sorted(self._starts.items())

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
