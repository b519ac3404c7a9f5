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
from kvcache_core.eviction import NO_PAGES, NOT_CACHED, EvictionQueue
from kvcache_core.slots import Numbers, Rows, SlotAllocator, Slots, rows_of

MIN_PRIORITY = 0
DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
NO_NODE = -1
NO_PAGE = -1
FREE = -1
"""Layer group of a slot without a page."""
RESERVED = -2
"""Layer group of a slot that padding rows write to."""
Flags = npt.NDArray[np.bool_]


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
        self.stamps = np.full(total, NOT_CACHED, dtype=np.int64)
        self.device_queue = EvictionQueue(self.stamps)
        self.host_queue = EvictionQueue(self.stamps)
        self.leased = 0
        self.quarantined = 0
        self.reserved = 0
        """Device slots that padding rows write to."""

    @property
    def num_device_slots(self) -> int:
        """Slots on the device; pages from this number on are on the host."""
        return self.device.num_slots

    @property
    def cached(self) -> Flags:
        """For each page whether only the prefix tree knows it. For checks."""
        cached: Flags = self.stamps != NOT_CACHED
        return cached

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
        rows = rows_of(pages)
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
        rows = rows_of(pages)
        self._uncache(rows)
        self.holders[rows] += 1

    def release(self, pages: Numbers) -> None:
        """One sequence less uses each of ``pages``; given deepest block first, which is the order
        in which they are lost.
        """
        rows = rows_of(pages)
        holders = self.holders[rows] - 1
        invariant(not np.count_nonzero(holders < 0), "a released page has no holder")
        self.holders[rows] = holders
        self._settle(rows, holders)

    def pin(self, pages: Slots) -> None:
        """One more transfer may touch each of ``pages``."""
        rows = rows_of(pages)
        self._uncache(rows)
        leases = self.leases[rows] + 1
        self.leases[rows] = leases
        self.leased += int(np.count_nonzero(leases == 1))

    def unpin(self, pages: Slots) -> None:
        """One transfer less may touch each of ``pages``."""
        rows = rows_of(pages)
        leases = self.leases[rows] - 1
        invariant((leases >= 0).all(), "an unpinned page has no lease")
        self.leases[rows] = leases
        self.leased -= int(np.count_nonzero(leases == 0))
        self._settle(rows, self.holders[rows])

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

    def forget(self, pages: Numbers) -> None:
        """The tree no longer knows ``pages``."""
        rows = rows_of(pages)
        cached = self._uncache(rows)
        self.node[rows] = NO_NODE
        if cached == len(rows):
            self._free(rows)
        else:
            self._settle(rows, self.holders[rows])

    def raise_priority(self, pages: Slots, priority: int | npt.NDArray[np.uint8]) -> None:
        """``pages``, which are in use, deserve at least this priority."""
        self.priority[pages] = np.maximum(self.priority[pages], priority)

    def put_on_host(self, pages: Rows, targets: Slots) -> None:
        """The cached device pages ``pages`` now lie in the host slots ``targets``, as cached."""
        rows, hosted = rows_of(pages), rows_of(targets)
        for array in (self.group, self.priority, self.node):
            array[hosted] = array[rows]
        self.node[rows] = NO_NODE
        self.device_queue.remove(rows)
        self.host_queue.push(hosted, self.priority[hosted])
        self._free(rows)

    def is_private(self, pages: Slots) -> Flags:
        """True for each page that one sequence alone knows."""
        alone: Flags = (self.holders[pages] == 1) & (self.node[pages] == NO_NODE)
        return alone

    def is_writable(self, pages: Slots) -> Flags:
        """True for each page that is private and on the device."""
        writable: Flags = self.is_private(pages) & (pages < self.device.num_slots)
        return writable

    def is_unread(self, pages: Slots) -> Flags:
        """True for each page that is writable and that no transfer may touch.

        A matched page can become private while a transfer that began before reads it.
        """
        unread: Flags = self.is_writable(pages) & (self.leases[pages] == 0)
        return unread

    def move(self, sources: Slots, targets: Slots) -> None:
        """The tree has ``targets`` in place of ``sources``, which are used by sequences both."""
        self.node[targets] = self.node[sources]
        self.priority[targets] = np.maximum(self.priority[sources], self.priority[targets])
        self.node[sources] = NO_NODE

    def _settle(self, pages: Rows, holders: npt.NDArray[np.int32]) -> None:
        """Cache those of ``pages`` that only the tree knows, free those that nobody does; none of
        them is cached.
        """
        uses = holders + self.leases[pages] if self.leased else holders
        if np.count_nonzero(uses):
            pages = pages[uses == 0]
        known, unknown = divided(pages, self.node[pages] != NO_NODE)
        if len(known):
            self._cache(known)
        if len(unknown):
            self._free(unknown)

    def still_cached(self, pages: Rows) -> Rows:
        """Those of ``pages`` that only the tree knows."""
        return divided(pages, self.stamps[pages] != NOT_CACHED)[0]

    def _cache(self, pages: Rows) -> None:
        device, host = self._by_tier(pages)
        self.device_queue.push(device, self.priority[device])
        if len(host):
            self.host_queue.push(host, self.priority[host])

    def _uncache(self, pages: Rows) -> int:
        """None of ``pages`` is cached any more; how many were."""
        cached = self.still_cached(pages)
        if len(cached):
            device, host = self._by_tier(cached)
            self.device_queue.remove(device)
            if len(host):
                self.host_queue.remove(host)
        return len(cached)

    def _free(self, pages: Rows) -> None:
        self.group[pages] = FREE
        device, host = self._by_tier(pages)
        self.device.give(device)
        if len(host):
            self.host.give(host)

    def _by_tier(self, pages: Rows) -> tuple[Rows, Rows]:
        """Those of ``pages`` on the device, and those on the host."""
        if not self.host.num_slots:
            return pages, NO_PAGES
        return divided(pages, pages < self.device.num_slots)


def divided(pages: Rows, chosen: Flags) -> tuple[Rows, Rows]:
    """``pages`` that are chosen, and the others. Mostly all are of one kind: then nothing is
    copied.
    """
    count = np.count_nonzero(chosen)
    if count == len(pages):
        return pages, NO_PAGES
    return (pages[chosen], pages[~chosen]) if count else (NO_PAGES, pages)
