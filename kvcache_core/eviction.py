"""The order in which cached pages are lost: lowest priority first, then least recently cached.

Pages enter in batches and leave lazily: a page that is used again only loses its ``cached`` mark,
and a batch skips members whose mark or stamp is not its own. So caching and using a thousand pages
costs a few array operations, and evicting ``n`` pages costs in proportion to ``n``.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache_core.slots import Slots, index_of

NO_PAGES = np.empty(0, dtype=np.int32)
FRONT = 64
"""Members of a batch that are looked at together."""
SLACK = 4096
"""Entries of pages used again that are tolerated before they are swept out."""


class _Batch:
    """Pages cached together; those before ``start`` are gone."""

    __slots__ = ("pages", "stamp", "start")

    def __init__(self, stamp: int, pages: Slots) -> None:
        self.stamp = stamp
        self.pages = pages
        self.start = 0


class EvictionQueue:
    """Cached pages of one tier. ``cached`` and ``stamps`` are indexed by page and shared with the
    pool.
    """

    __slots__ = ("_cached", "_entries", "_levels", "_next_stamp", "_stamps", "count")

    def __init__(self, cached: npt.NDArray[np.bool_], stamps: npt.NDArray[np.int64]) -> None:
        self._cached = cached
        self._stamps = stamps
        self._levels: dict[int, deque[_Batch]] = {}
        self._next_stamp = 0
        self._entries = 0
        self.count = 0
        """Pages that are cached."""

    def push(self, pages: Slots, priorities: npt.NDArray[np.uint8]) -> None:
        """Cache pages; of equal priority the first is lost first."""
        if not len(pages):
            return
        self._next_stamp += 1
        rows = index_of(pages)
        self._cached[rows] = True
        self._stamps[rows] = self._next_stamp
        self.count += len(pages)
        self._entries += len(pages)
        lowest, highest = int(priorities.min()), int(priorities.max())
        if lowest == highest:
            self._level(lowest).append(_Batch(self._next_stamp, pages))
        else:
            for priority in np.unique(priorities).tolist():
                members = pages[priorities == priority]
                self._level(priority).append(_Batch(self._next_stamp, members))
        if self._entries > 2 * self.count + SLACK:
            self._sweep()

    def remove(self, pages: Slots) -> None:
        """These cached pages are cached no more."""
        self._cached[index_of(pages)] = False
        self.count -= len(pages)

    def first(self, count: int) -> Slots:
        """At least one and at most ``count`` pages to lose next, of one priority and in order; they
        stay cached. There must be a cached page.
        """
        found: list[Slots] = []
        missing = count
        for priority in sorted(self._levels):
            level = self._levels[priority]
            for batch in level:
                members = self._front(batch, missing)
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
        return found[0] if len(found) == 1 else np.concatenate([NO_PAGES, *found])

    def _front(self, batch: _Batch, count: int) -> Slots:
        """The first members of a batch that are still cached, at most ``count``."""
        found: list[Slots] = []
        place = batch.start
        while count and place < len(batch.pages):
            span = batch.pages[place : place + max(count, FRONT)]
            place += len(span)
            members = span[self._valid(batch.stamp, span)][:count]
            if not found and not len(members):
                self._entries -= place - batch.start
                batch.start = place
                continue
            found.append(members)
            count -= len(members)
        return found[0] if len(found) == 1 else np.concatenate([NO_PAGES, *found])

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

    def _valid(self, stamp: int, pages: Slots) -> npt.NDArray[np.bool_]:
        valid: npt.NDArray[np.bool_] = self._cached[pages] & (self._stamps[pages] == stamp)
        return valid

    def _rest(self, batch: _Batch) -> Slots:
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
