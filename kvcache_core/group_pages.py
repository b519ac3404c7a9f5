"""The pages of one sequence in one layer group, and the block table that kernels read.

``pages[i]`` and ``table[i]`` always agree: the page's slot, or -1 where the block has no page. A
recurrent group has one entry, the live state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.errors import invariant
from kvcache_core.groups import LayerGroup
from kvcache_core.pages import Page

MISSING = -1
FIRST_ROOM = 16


class GroupPages:
    """Growing list of pages with its int32 table.

    ``stale_end``: sinks aside, blocks below it are dropped. ``publish_from``: blocks below it hold
    KV that was not written by this sequence's drafter and must not be published. ``unfilled``: the
    matched prefix has no pages here yet.
    """

    __slots__ = ("_room", "_view", "group", "pages", "publish_from", "stale_end", "unfilled")

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.pages: list[Page | None] = []
        self.stale_end = group.life_cycle.sink_blocks
        self.publish_from = 0
        self.unfilled = False
        self._room = np.full(FIRST_ROOM, MISSING, dtype=np.int32)
        self._view: npt.NDArray[np.int32] | None = None

    def append(self, pages: Sequence[Page | None]) -> None:
        """Add blocks at the end."""
        start = len(self.pages)
        end = start + len(pages)
        if end > len(self._room):
            room = np.full(max(end, 2 * len(self._room)), MISSING, dtype=np.int32)
            room[:start] = self._room[:start]
            self._room = room
        self._room[start:end] = [MISSING if page is None else page.slot for page in pages]
        self.pages.extend(pages)
        self._view = None

    def put(self, ordinal: int, page: Page) -> Page | None:
        """Set the page of a block; returns the one that was there."""
        old = self.pages[ordinal]
        self.pages[ordinal] = page
        self._room[ordinal] = page.slot
        return old

    def drop(self, ordinal: int) -> Page | None:
        """Take the page of a block away and return it."""
        old = self.pages[ordinal]
        self.pages[ordinal] = None
        self._room[ordinal] = MISSING
        return old

    def last(self, end: int) -> Page | None:
        """The page of block ``end - 1``, where the next slot would be best."""
        return self.pages[end - 1] if 0 < end <= len(self.pages) else None

    def table(self) -> npt.NDArray[np.int32]:
        """Slots by block ordinal, read-only; the same array until the number of blocks changes."""
        if self._view is None:
            self._view = self._room[: len(self.pages)]
            self._view.flags.writeable = False
        return self._view

    def check(self) -> None:
        """Raise InvariantViolation when table and pages differ."""
        expected = [MISSING if page is None else page.slot for page in self.pages]
        invariant(
            self.table().tolist() == expected,
            f"layer group {self.group.id}: table {self.table().tolist()}, pages {expected}",
        )
