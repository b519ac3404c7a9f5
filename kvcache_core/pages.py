"""Pages and the pools that hold them, as arrays indexed by page.

A page is one slot occupied by the data of one block of one layer group. Pages of a pool group are
numbered: device slots ``0 .. D-1``, then host slots ``D .. D+H-1``. A slot is free or has exactly
one page. A page is *in use* while sequences hold it, *leased* while transfers may touch it,
*cached* when only the prefix tree knows it (then it is in its tier's eviction queue), and freed
when nobody does. Pools never decide what the tree loses: they name their next victims.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_core.errors import invariant
from kvcache_core.eviction import EvictionQueue
from kvcache_core.slots import SlotAllocator, Slots, index_of

MIN_PRIORITY = 0
DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
NO_NODE = -1
NO_PAGE = -1
FREE = -1
"""Layer group of a slot without a page."""
RESERVED = -2
"""Layer group of a slot that padding rows write to."""


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Device slots of one pool group by state, and its host slots."""

    total: int
    free: int
    cached: int
    leased: int
    quarantined: int
    host_total: int = 0
    host_free: int = 0
    host_cached: int = 0

    @property
    def available(self) -> int:
        """Device slots that an allocation could get."""
        return self.free + self.cached

    @property
    def unavailable(self) -> int:
        """Device slots that sequences hold or transfers pin."""
        return self.total - self.free - self.cached


class PagePool:
    """The pages of one pool group. Every array has one entry per device and host slot."""

    __slots__ = (
        "cached",
        "device",
        "device_queue",
        "group",
        "holders",
        "host",
        "host_queue",
        "leased",
        "leases",
        "node",
        "priority",
        "quarantined",
        "quarantines",
        "reserved",
        "stamps",
    )

    def __init__(self, device_slots: int, host_slots: int) -> None:
        total = device_slots + host_slots
        self.device = SlotAllocator(device_slots)
        self.host = SlotAllocator(host_slots, first=device_slots)
        self.group = np.full(total, FREE, dtype=np.int16)
        self.holders = np.zeros(total, dtype=np.int32)
        self.leases = np.zeros(total, dtype=np.int32)
        self.quarantines = np.zeros(total, dtype=np.int32)
        self.node = np.full(total, NO_NODE, dtype=np.int32)
        self.priority = np.zeros(total, dtype=np.uint8)
        self.cached = np.zeros(total, dtype=np.bool_)
        self.stamps = np.zeros(total, dtype=np.int64)
        self.device_queue = EvictionQueue(self.cached, self.stamps)
        self.host_queue = EvictionQueue(self.cached, self.stamps)
        self.leased = 0
        self.quarantined = 0
        self.reserved = 0
        """Device slots that padding rows write to."""

    @property
    def num_device_slots(self) -> int:
        """Slots on the device; pages from this number on are on the host."""
        return self.device.num_slots

    @property
    def available(self) -> int:
        """Device slots that an allocation could get: free ones and cached ones."""
        return self.device.free + self.device_queue.count

    @property
    def usable(self) -> int:
        """Device slots that sequences may ever have."""
        return self.device.num_slots - self.reserved

    @property
    def utilisation(self) -> float:
        """Share of the usable device slots that sequences hold or transfers pin, 0..1."""
        return 1 - self.available / max(1, self.usable)

    def usage(self) -> PoolUsage:
        """Counts by state."""
        return PoolUsage(
            total=self.device.num_slots,
            free=self.device.free,
            cached=self.device_queue.count,
            leased=self.leased,
            quarantined=self.quarantined,
            host_total=self.host.num_slots,
            host_free=self.host.free,
            host_cached=self.host_queue.count,
        )

    def create(self, count: int, after: int | None, layer_group: int, priority: int) -> Slots:
        """New device pages with one holder each; enough slots must be free."""
        pages = self.device.take(count, after)
        rows = index_of(pages)
        self.group[rows] = layer_group
        self.holders[rows] = 1
        self.priority[rows] = priority
        return pages

    def reserve(self) -> int:
        """Take one free device slot out of circulation for good."""
        slot = int(self.device.take(1)[0])
        self.group[slot] = RESERVED
        self.reserved += 1
        return slot

    def hold(self, pages: Slots) -> None:
        """One more sequence uses each of ``pages``, which are distinct."""
        self._uncache(pages)
        self.holders[pages] += 1

    def release(self, pages: Slots) -> None:
        """One sequence less uses each of ``pages``; given deepest block first, which is the order
        in which they are lost.
        """
        rows = index_of(pages)
        holders = self.holders[rows] - 1
        invariant((holders >= 0).all(), "a released page has no holder")
        self.holders[rows] = holders
        self.settle(pages)

    def pin(self, pages: Slots) -> None:
        """One more transfer may touch each of ``pages``."""
        self._uncache(pages)
        leases = self.leases[pages] + 1
        self.leases[pages] = leases
        self.leased += int(np.count_nonzero(leases == 1))

    def unpin(self, pages: Slots) -> None:
        """One transfer less may touch each of ``pages``."""
        leases = self.leases[pages] - 1
        invariant((leases >= 0).all(), "an unpinned page has no lease")
        self.leases[pages] = leases
        self.leased -= int(np.count_nonzero(leases == 0))
        self.settle(pages)

    def quarantine(self, pages: Slots) -> None:
        """Pinned pages are now in doubt."""
        doubts = self.quarantines[pages] + 1
        self.quarantines[pages] = doubts
        self.quarantined += int(np.count_nonzero(doubts == 1))

    def end_quarantine(self, pages: Slots) -> None:
        """The doubt is over; the pins are ended separately."""
        doubts = self.quarantines[pages] - 1
        self.quarantines[pages] = doubts
        self.quarantined -= int(np.count_nonzero(doubts == 0))

    def forget(self, pages: Slots) -> None:
        """The tree no longer knows ``pages``."""
        rows = index_of(pages)
        are_idle = bool(self.cached[rows].all())
        self._uncache(pages)
        self.node[rows] = NO_NODE
        if are_idle:
            self._free(pages)
        else:
            self.settle(pages)

    def raise_priority(self, pages: Slots, priority: int | npt.NDArray[np.uint8]) -> None:
        """``pages``, which are in use, deserve at least this priority."""
        self.priority[pages] = np.maximum(self.priority[pages], priority)

    def put_on_host(self, pages: Slots, targets: Slots) -> None:
        """The cached device pages ``pages`` now lie in the host slots ``targets``, as cached."""
        for array in (self.group, self.priority, self.node):
            array[targets] = array[pages]
        self.node[pages] = NO_NODE
        self.device_queue.remove(pages)
        self.host_queue.push(targets, self.priority[targets])
        self._free(pages)

    def is_private(self, pages: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for each page that one sequence alone knows."""
        alone: np.ndarray[tuple[int], np.dtype[np.bool_]] = (self.holders[pages] == 1) & (
            self.node[pages] == NO_NODE
        )
        return alone

    def is_writable(self, pages: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for each page that is private and on the device."""
        writable: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.is_private(pages) & (
            pages < self.device.num_slots
        )
        return writable

    def is_unread(self, pages: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for each page that is writable and that no transfer may touch.

        A matched page can become private while a transfer that began before reads it.
        """
        unread: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.is_writable(pages) & (
            self.leases[pages] == 0
        )
        return unread

    def move(self, sources: Slots, targets: Slots) -> None:
        """The tree has ``targets`` in place of ``sources``, which are used by sequences both."""
        self.node[targets] = self.node[sources]
        self.priority[targets] = np.maximum(self.priority[sources], self.priority[targets])
        self.node[sources] = NO_NODE

    def settle(self, pages: Slots) -> None:
        """Cache what only the tree knows, free what nobody does."""
        rows = index_of(pages)
        idle = pages[(self.holders[rows] == 0) & (self.leases[rows] == 0) & ~self.cached[rows]]
        if not len(idle):
            return
        in_tree = self.node[index_of(idle)] != NO_NODE
        if in_tree.all():
            self._cache(idle)
            return
        self._cache(idle[in_tree])
        self._free(idle[~in_tree])

    def _cache(self, pages: Slots) -> None:
        on_host = pages >= self.device.num_slots
        if not on_host.any():
            self.device_queue.push(pages, self.priority[index_of(pages)])
            return
        for queue, members in (
            (self.device_queue, pages[~on_host]),
            (self.host_queue, pages[on_host]),
        ):
            queue.push(members, self.priority[members])

    def _uncache(self, pages: Slots) -> None:
        cached = pages[self.cached[index_of(pages)]]
        if not len(cached):
            return
        on_host = cached >= self.device.num_slots
        if not on_host.any():
            self.device_queue.remove(cached)
            return
        self.device_queue.remove(cached[~on_host])
        self.host_queue.remove(cached[on_host])

    def _free(self, pages: Slots) -> None:
        self.group[index_of(pages)] = FREE
        on_host = pages >= self.device.num_slots
        if not on_host.any():
            self.device.give(pages)
            return
        self.device.give(pages[~on_host])
        self.host.give(pages[on_host])
