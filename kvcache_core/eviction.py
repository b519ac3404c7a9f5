"""The order in which cached pages are lost: lowest priority first, then least recently cached.

Pages enter in batches and leave lazily: a page that is used again only loses its stamp, and a batch
skips members whose stamp is not its own. So caching and using a thousand pages costs a few array
operations, and evicting ``n`` pages costs in proportion to ``n``.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache_core.slots import Numbers, Rows, rows_of

NO_PAGES: Rows = np.empty(0, dtype=np.intp)
NOT_CACHED = 0
FRONT = 64
"""Members of a batch that are looked at together."""
SLACK = 4096
"""Entries of pages used again that are tolerated before they are swept out."""


class _Batch:
    """Pages cached together; those before ``start`` are gone."""

    __slots__ = ("pages", "stamp", "start")

    def __init__(self, stamp: int, pages: Rows) -> None:
        self.stamp = stamp
        self.pages = pages
        self.start = 0


class EvictionQueue:
    """Cached pages of one tier. ``stamps`` is indexed by page and shared with the pool: the number
    of the batch with which a page was cached, NOT_CACHED for one that is not.
    """

    __slots__ = ("_entries", "_levels", "_next_stamp", "_stamps", "count")

    def __init__(self, stamps: npt.NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._levels: dict[int, deque[_Batch]] = {}
        self._next_stamp = 0
        self._entries = 0
        self.count = 0
        """Pages that are cached."""

    def push(self, pages: Rows, priorities: npt.NDArray[np.uint8]) -> None:
        """Cache pages; of equal priority the first is lost first."""
        if not len(pages):
            return
        self._next_stamp += 1
        self._stamps[pages] = self._next_stamp
        self.count += len(pages)
        self._entries += len(pages)
        first = priorities[0]
        if not np.count_nonzero(priorities != first):
            self._level(int(first)).append(_Batch(self._next_stamp, pages))
        else:
            for priority in np.unique(priorities).tolist():
                members = pages[priorities == priority]
                self._level(priority).append(_Batch(self._next_stamp, members))
        if self._entries > 2 * self.count + SLACK:
            self._sweep()

    def remove(self, pages: Numbers) -> None:
        """These cached pages are cached no more."""
        self._stamps[rows_of(pages)] = NOT_CACHED
        self.count -= len(pages)

    def first(self, count: int) -> Rows:
        """At least one and at most ``count`` pages to lose next, of one priority and in order; they
        stay cached. There must be a cached page.
        """
        found: list[Rows] = []
        missing = count
        for priority in sorted(self._levels):
            level = self._levels[priority]
            for batch in level:
                members = self._front(batch, missing)
                if len(members):
                    found.append(members)
                    missing -= len(members)
                if not missing:
                    break
            while level and level[0].start == len(level[0].pages):
                level.popleft()
            if not level:
                del self._levels[priority]
            if missing < count:
                break
        return _joined(found)

    def _front(self, batch: _Batch, count: int) -> Rows:
        """The first members of a batch that are still cached, at most ``count``."""
        found: list[Rows] = []
        place = batch.start
        while count and place < len(batch.pages):
            span = batch.pages[place : place + max(count, FRONT)]
            place += len(span)
            valid = self._valid(batch.stamp, span)
            alive = np.count_nonzero(valid)
            if alive < len(span) and not found:
                gone = int(valid.argmax()) if alive else len(span)
                batch.start += gone
                self._entries -= gone
            if alive:
                members = span if alive == len(span) else span[valid]
                found.append(members[:count])
                count -= len(found[-1])
        return _joined(found)

    def ordered(self) -> list[int]:
        """All cached pages, the next to lose first. For checks."""
        return [
            page
            for priority in sorted(self._levels)
            for batch in self._levels[priority]
            for page in self._rest(batch).tolist()
        ]

    def _level(self, priority: int) -> deque[_Batch]:
        return self._levels.setdefault(priority, deque())

    def _valid(self, stamp: int, pages: Rows) -> npt.NDArray[np.bool_]:
        valid: npt.NDArray[np.bool_] = self._stamps[pages] == stamp
        return valid

    def _rest(self, batch: _Batch) -> Rows:
        pages = batch.pages[batch.start :]
        return pages[self._valid(batch.stamp, pages)]

    def _sweep(self) -> None:
        self._entries = 0
        for priority, level in list(self._levels.items()):
            kept: deque[_Batch] = deque()
            for batch in level:
                rest = self._rest(batch)
                if len(rest):
                    kept.append(_Batch(batch.stamp, rest))
                    self._entries += len(rest)
            if kept:
                self._levels[priority] = kept
            else:
                del self._levels[priority]


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES
