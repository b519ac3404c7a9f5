"""A lease: pages a transfer may touch, pinned until the last access is physically over.

It outlives the sequence it came from. Nothing ends it but the owner's call: ``release`` once the
access has ended, ``quarantine`` when nobody can tell whether it has. Quarantined pages leave the
prefix tree and stay out of circulation until a later ``release``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from typing_extensions import override

from kvcache_core.errors import InvariantViolation
from kvcache_core.pages import NO_NODE
from kvcache_core.slots import Slots
from kvcache_core.store import CacheStore, PageUser


class LeaseState(Enum):
    """ACTIVE -> RELEASED, or ACTIVE -> QUARANTINED (-> RELEASED once the doubt is over)."""

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class PageLease(PageUser):
    """Pages of blocks ``[first_block, end_block)`` in every transferable view."""

    def __init__(
        self,
        store: CacheStore,
        first_block: int,
        end_block: int,
        tables: Mapping[int, Slots],
        pages: Mapping[int, Slots],
    ) -> None:
        """``tables`` and ``pages`` are by layer group, the first with gaps, the second without."""
        self.first_block = first_block
        self.end_block = end_block
        self.state = LeaseState.ACTIVE
        self._store = store
        self._id = store.new_id()
        self._pages = dict(pages)
        self._slots = {
            view.id: tables[view.layer_group] for view in store.plan.views if view.transferable
        }
        for group, pinned in self._pages.items():
            store.pool_of[group].pin(pinned)
        store.leases[self._id] = self
        store.counters.leases_opened += 1

    @property
    def views(self) -> tuple[int, ...]:
        """Ids of the views it covers."""
        return tuple(self._slots)

    def slots(self, view: int) -> Slots:
        """Slots of blocks first_block..end_block in one view, -1 where the block is stale.

        For a recurrent view: one slot, the live state. Raises KeyError for a private view.
        """
        return self._slots[view]

    def release(self) -> None:
        """The last access is over. Raises InvariantViolation the second time."""
        if self.state is LeaseState.RELEASED:
            raise InvariantViolation("a lease can be released only once")
        in_doubt = self.state is LeaseState.QUARANTINED
        self.state = LeaseState.RELEASED
        for group, pages in self._pages.items():
            pool = self._store.pool_of[group]
            if in_doubt:
                pool.end_quarantine(pages)
            pool.unpin(pages[::-1])
        del self._store.leases[self._id]
        self._store.counters.leases_released += 1

    def quarantine(self) -> None:
        """Nobody knows whether the access is over: keep the pages out of circulation."""
        if self.state is not LeaseState.ACTIVE:
            raise InvariantViolation(f"only an active lease can be quarantined, not {self.state}")
        self.state = LeaseState.QUARANTINED
        for group, pages in self._pages.items():
            pool = self._store.pool_of[group]
            pool.quarantine(pages)
            in_tree = pages[pool.node[pages] != NO_NODE]
            self._store.lose(self._store.groups[group].pool_group, in_tree)
        self._store.counters.leases_quarantined += 1

    @override
    def used_pages(self) -> Iterable[tuple[int, Slots]]:
        for group, pages in self._pages.items():
            yield self._store.groups[group].pool_group, pages

    @override
    def tip(self) -> int:
        return NO_NODE

    @override
    def check(self) -> None:
        if self.state is LeaseState.RELEASED:
            raise InvariantViolation("a released lease is still registered")
