"""The order in which cached pages are lost: lowest priority first, then least recently cached.

Pages leave lazily: a page that is used again only loses its stamp, and entries whose stamp is not
the page's own are skipped. So caching and using a thousand pages costs a few array operations, and
evicting ``n`` pages costs in proportion to ``n``.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache_core.slots import Rows

NO_PAGES: Rows = np.empty(0, dtype=np.intp)
NOT_CACHED = 0
CHUNK = 4096
"""Entries that lie together, however many times pages were cached."""
FRONT = 64
"""Entries that are looked at together, at least."""
SLACK = 4096
"""Entries of pages used again that are tolerated before they are swept out."""


class _Chunk:
    """Pages in the order in which they were cached, with the stamps they got, from ``start`` to
    ``end``. What is there is never written over: it may have been handed out.
    """

    __slots__ = ("end", "pages", "stamps", "start")

    def __init__(self) -> None:
        self.pages: Rows = np.empty(CHUNK, dtype=np.intp)
        self.stamps = np.empty(CHUNK, dtype=np.int64)
        self.start = 0
        self.end = 0

    def append(self, pages: Rows, stamps: int | npt.NDArray[np.int64]) -> None:
        """There must be room."""
        end = self.end + len(pages)
        self.pages[self.end : end] = pages
        self.stamps[self.end : end] = stamps
        self.end = end


class EvictionQueue:
    """Cached pages of one tier. ``stamps`` is indexed by page and shared with the pool: the number
    of the push with which a page was cached, NOT_CACHED for one that is not.
    """

    __slots__ = ("_entries", "_levels", "_next_stamp", "_stamps", "count")

    def __init__(self, stamps: npt.NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._levels: dict[int, deque[_Chunk]] = {}
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
            self._append(int(first), pages)
        else:
            for priority in np.unique(priorities).tolist():
                self._append(priority, pages[priorities == priority])
        if self._entries > 2 * self.count + SLACK:
            self._sweep()

    def remove(self, pages: Rows) -> None:
        """These cached pages are cached no more."""
        self._stamps[pages] = NOT_CACHED
        self.count -= len(pages)

    def first(self, count: int) -> Rows:
        """At least one and at most ``count`` pages to lose next, of one priority and in order; they
        stay cached. There must be a cached page.
        """
        found: list[Rows] = []
        missing = count
        for priority in sorted(self._levels):
            level = self._levels[priority]
            for chunk in level:
                missing -= self._look(chunk, missing, found)
                if not missing:
                    break
            while level and level[0].start == level[0].end:
                level.popleft()
            if not level:
                del self._levels[priority]
            if found:
                break
        return found[0] if len(found) == 1 else np.concatenate([NO_PAGES, *found])

    def _look(self, chunk: _Chunk, count: int, found: list[Rows]) -> int:
        """Add the first pages of a chunk that are still cached to ``found``, at most ``count``; how
        many there were. Entries before the first of them are not looked at again.
        """
        missing, place = count, chunk.start
        while missing and place < chunk.end:
            span = slice(place, min(place + max(missing, FRONT), chunk.end))
            pages, valid = chunk.pages[span], self._valid(chunk, span)
            alive = int(np.count_nonzero(valid))
            if alive < len(pages):
                if missing == count:
                    gone = int(valid.argmax()) if alive else len(pages)
                    chunk.start += gone
                    self._entries -= gone
                pages = pages[valid]
            if alive:
                found.append(pages[:missing])
                missing -= min(missing, alive)
            place = span.stop
        return count - missing

    def ordered(self) -> list[int]:
        """All cached pages, the next to lose first. For checks."""
        return [
            page
            for priority in sorted(self._levels)
            for chunk in self._levels[priority]
            for page in self._rest(chunk)[0].tolist()
        ]

    def _append(self, priority: int, pages: Rows) -> None:
        level = self._levels.setdefault(priority, deque())
        while len(pages):
            if not level or level[-1].end == CHUNK:
                level.append(_Chunk())
            room = CHUNK - level[-1].end
            level[-1].append(pages[:room], self._next_stamp)
            pages = pages[room:]

    def _valid(self, chunk: _Chunk, span: slice) -> npt.NDArray[np.bool_]:
        valid: npt.NDArray[np.bool_] = self._stamps[chunk.pages[span]] == chunk.stamps[span]
        return valid

    def _rest(self, chunk: _Chunk) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Pages of a chunk that are still cached, and their stamps."""
        span = slice(chunk.start, chunk.end)
        valid = self._valid(chunk, span)
        return chunk.pages[span][valid], chunk.stamps[span][valid]

    def _sweep(self) -> None:
        self._entries = 0
        for priority, level in list(self._levels.items()):
            kept: deque[_Chunk] = deque()
            for chunk in level:
                pages, stamps = self._rest(chunk)
                if not kept or kept[-1].end + len(pages) > CHUNK:
                    kept.append(_Chunk())
                kept[-1].append(pages, stamps)
                self._entries += len(pages)
            if kept[-1].end:
                self._levels[priority] = kept
            else:
                del self._levels[priority]
