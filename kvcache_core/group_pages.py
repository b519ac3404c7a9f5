"""The pages of one sequence in one layer group: the block table that kernels read.

``table`` has the page of each block ordinal, or NO_PAGE. Pages numbered from the pool's device
slots on lie on the host; they are brought to the device before anything is computed. A recurrent
group has one entry, the live state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache_core.groups import LayerGroup
from kvcache_core.pages import NO_PAGE, PagePool
from kvcache_core.slots import Slots

FIRST_ROOM = 16
NO_ROOM: Slots = np.empty(0, dtype=np.int32)


class GroupPages:
    """Growing block table of one layer group.

    ``stale_end``: sinks aside, blocks below it are dropped. ``publish_from``: blocks below it hold
    KV that was not written by this sequence's drafter and must not be published. ``unfilled``: the
    matched prefix has no pages here yet. ``on_host``: some pages may lie on the host.
    """

    __slots__ = (
        "_room",
        "_view",
        "group",
        "on_host",
        "pool",
        "publish_from",
        "size",
        "stale_end",
        "unfilled",
    )

    def __init__(self, group: LayerGroup, pool: PagePool) -> None:
        self.group = group
        self.pool = pool
        self.stale_end = group.life_cycle.sink_blocks
        self.publish_from = 0
        self.unfilled = False
        self.on_host = False
        self.size = 0
        self._room = NO_ROOM
        self._view: Slots | None = None

    @property
    def pages(self) -> Slots:
        """The page of each block; writable, the room itself."""
        return self._room[: self.size]

    @property
    def used(self) -> Slots:
        """Every page, a copy."""
        used: Slots = self.pages[self.pages != NO_PAGE]
        return used

    @property
    def hosted(self) -> npt.NDArray[np.int64]:
        """Ordinals of blocks whose pages lie on the host."""
        return np.flatnonzero(self.pages >= self.pool.num_device_slots)

    def resize(self, size: int) -> None:
        """Have ``size`` blocks; new ones without a page."""
        if size > len(self._room):
            most = max(size, 2 * len(self._room), FIRST_ROOM)
            room = np.full(most, NO_PAGE, dtype=np.int32)
            room[: self.size] = self.pages
            self._room = room
        if size != self.size:
            self.size = size
            self._view = None

    def take(self, start: int, end: int) -> Slots:
        """Take the pages of blocks ``[start, end)`` away, last block first."""
        dropped = self._room[start:end]
        pages: Slots = dropped[dropped != NO_PAGE][::-1]
        dropped[:] = NO_PAGE
        return pages

    def before(self, ordinal: int) -> int | None:
        """The device slot of the block before ``ordinal``, behind which the next is best."""
        if not 0 < ordinal <= self.size:
            return None
        page = int(self._room[ordinal - 1])
        return page if 0 <= page < self.pool.num_device_slots else None

    def table(self) -> Slots:
        """Slots by block ordinal, read-only; the same array until the number of blocks changes.

        Blocks on the host have none yet.
        """
        if self._view is None:
            self._view = self._room[: self.size]
            self._view.flags.writeable = False
        if self.on_host:
            on_device = self._view < self.pool.num_device_slots
            return np.where(on_device, self._view, np.int32(NO_PAGE))
        return self._view
