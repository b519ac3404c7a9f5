"""Pages and the pools that hold them.

A page is one slot occupied by the data of one block of one layer group. A slot is free or has
exactly one page. A page is *in use* while sequences hold it, *leased* while transfers may touch it,
*cached* when only the prefix tree knows it (then it is in an eviction queue), and freed when nobody
does. Pools never decide what the tree loses: they hand out their next victim, the store drops it.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_core.errors import invariant
from kvcache_core.slots import SlotAllocator

if TYPE_CHECKING:
    from kvcache_core.tree import Node

MIN_PRIORITY = 0
DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100


class Page:
    """One occupied slot. ``holders`` counts sequences, ``leases`` pins, ``quarantines`` doubts."""

    __slots__ = (
        "cached",
        "holders",
        "layer_group",
        "leases",
        "node",
        "priority",
        "quarantines",
        "slot",
    )

    def __init__(self, slot: int, layer_group: int, priority: int) -> None:
        self.slot = slot
        self.layer_group = layer_group
        self.priority = priority
        self.holders = 1
        self.leases = 0
        self.quarantines = 0
        self.cached = False
        self.node: Node | None = None


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Slots of one pool group by state. total = free + cached + in_use + pinned_only."""

    total: int
    free: int
    cached: int
    leased: int
    quarantined: int

    @property
    def available(self) -> int:
        """Slots that an allocation could get."""
        return self.free + self.cached

    @property
    def unavailable(self) -> int:
        """Slots that sequences hold or transfers pin."""
        return self.total - self.free - self.cached


class PagePool:
    """The pages of one pool group."""

    __slots__ = ("_priorities", "_queues", "cached", "leased", "pages", "quarantined", "slots")

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotAllocator(num_slots)
        self.pages: list[Page | None] = [None] * num_slots
        self.cached = 0
        self.leased = 0
        self.quarantined = 0
        self._queues: dict[int, OrderedDict[int, Page]] = {}
        self._priorities: list[int] = []

    @property
    def available(self) -> int:
        """Slots that an allocation could get: free ones and cached ones."""
        return self.slots.free + self.cached

    def usage(self) -> PoolUsage:
        """Counts by state."""
        return PoolUsage(
            total=self.slots.num_slots,
            free=self.slots.free,
            cached=self.cached,
            leased=self.leased,
            quarantined=self.quarantined,
        )

    def create(self, count: int, after: int | None, layer_group: int, priority: int) -> list[Page]:
        """New pages with one holder each; enough slots must be free."""
        pages = [Page(slot, layer_group, priority) for slot in self.slots.take(count, after)]
        for page in pages:
            self.pages[page.slot] = page
        return pages

    def hold(self, page: Page) -> None:
        """One more sequence uses ``page``."""
        if page.cached:
            self._dequeue(page)
        page.holders += 1

    def release(self, page: Page) -> None:
        """One sequence less uses ``page``."""
        invariant(page.holders > 0, f"page in slot {page.slot} has no holder to release")
        page.holders -= 1
        self._settle(page)

    def pin(self, page: Page) -> None:
        """One more transfer may touch ``page``."""
        if page.cached:
            self._dequeue(page)
        page.leases += 1
        self.leased += page.leases == 1

    def unpin(self, page: Page) -> None:
        """One transfer less may touch ``page``."""
        invariant(page.leases > 0, f"page in slot {page.slot} has no lease to end")
        page.leases -= 1
        self.leased -= page.leases == 0
        self._settle(page)

    def quarantine(self, page: Page) -> None:
        """A pinned page is now in doubt."""
        page.quarantines += 1
        self.quarantined += page.quarantines == 1

    def end_quarantine(self, page: Page) -> None:
        """The doubt is over; the pin is ended separately."""
        page.quarantines -= 1
        self.quarantined -= page.quarantines == 0

    def forget(self, page: Page) -> None:
        """The tree no longer knows ``page``."""
        page.node = None
        if page.cached:
            self._dequeue(page)
        self._settle(page)

    def victim(self) -> Page:
        """The cached page to lose next: lowest priority, then least recently used."""
        invariant(self.cached > 0, "no cached page to evict")
        return next(iter(self._queues[self._priorities[0]].values()))

    def queued(self) -> list[Page]:
        """All cached pages, next victim first. For checks."""
        return [page for level in self._priorities for page in self._queues[level].values()]

    def _settle(self, page: Page) -> None:
        if page.holders or page.leases or page.cached:
            return
        if page.node is not None:
            self._enqueue(page)
            return
        invariant(self.pages[page.slot] is page, f"slot {page.slot} does not hold its page")
        self.pages[page.slot] = None
        self.slots.give(page.slot)

    def _enqueue(self, page: Page) -> None:
        queue = self._queues.get(page.priority)
        if queue is None:
            queue = self._queues[page.priority] = OrderedDict()
            insort(self._priorities, page.priority)
        queue[page.slot] = page
        page.cached = True
        self.cached += 1

    def _dequeue(self, page: Page) -> None:
        queue = self._queues[page.priority]
        del queue[page.slot]
        if not queue:
            del self._queues[page.priority]
            self._priorities.remove(page.priority)
        page.cached = False
        self.cached -= 1
