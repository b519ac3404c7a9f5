"""A pending snapshot: a slot that kernels fill with the recurrent state of a coming commit.

It is private until it is published as the state at one exact length, or given up. A snapshot inside
a block brings copies of the block's attention pages along, because the sequence goes on writing its
own.
"""

from __future__ import annotations

import numpy as np

from kvcache_core.errors import invariant
from kvcache_core.group_pages import GroupPages
from kvcache_core.pages import NO_PAGE
from kvcache_core.publishing import publish_partial
from kvcache_core.sequence_pages import Order, SequencePages
from kvcache_core.slots import Slots
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore


class PendingSnapshot:
    """One page of the shared recurrent layer group."""

    def __init__(self, store: CacheStore, states: GroupPages, page: Slots) -> None:
        self._store = store
        self._states = states
        self._page = page

    @classmethod
    def acquire(cls, store: CacheStore, pages: SequencePages) -> PendingSnapshot | None:
        """Take a slot; None when nothing is free or evictable.

        Raises InvariantViolation unless exactly one recurrent group is shared.
        """
        states = _shared_states(pages)
        made = pages.allocate([Order.appending(states, range(1))])
        return None if made is None else cls(store, states, made[0])

    @classmethod
    def copy_live(cls, store: CacheStore, pages: SequencePages) -> PendingSnapshot | None:
        """As :meth:`acquire`, with the bytes of the live state already in the slot."""
        states = _shared_states(pages)
        made = pages.allocate([pages.copy_order(states, 0)])
        return None if made is None else cls(store, states, made[0])

    @property
    def slot(self) -> int:
        """Where kernels write the state."""
        return int(self._page[0])

    def used_page(self) -> tuple[int, Slots]:
        """(pool group, page)."""
        return self._states.group.pool_group, self._page

    def release(self) -> None:
        """Give it up; in the tree it stays if it was published."""
        self._states.pool.release(self._page)

    def publish(self, pages: SequencePages, tip: int, length: int, tail: bytes) -> bool:
        """Publish it as the state at ``length`` tokens, of which ``tail`` follow the block ``tip``.

        False when there is one already or pages for a copy are missing.
        """
        if tail:
            return self._publish_partial(pages, tip, length, tail)
        group = self._states.group
        if self._store.tree.pages[group.id, tip] != NO_PAGE:
            return False
        self._store.publish(group, self._page, np.array([tip], dtype=np.int32))
        return True

    def _publish_partial(self, pages: SequencePages, parent: int, length: int, tail: bytes) -> bool:
        store, group = self._store, self._states.group
        _, there = store.tree.child(parent, tail)
        if there is not None and store.tree.pages[group.id, there] != NO_PAGE:
            return False
        ordinal = length // store.tokens_per_block
        copied = [
            attention
            for attention in pages.attention
            if attention.group.life_cycle.policy is not ReusePolicy.PRIVATE
            and ordinal >= attention.publish_from
            and attention.pages[ordinal] != NO_PAGE
        ]
        made = pages.allocate([pages.copy_order(attention, ordinal) for attention in copied])
        if made is None:
            return False
        copies = {a.group.id: int(new[0]) for a, new in zip(copied, made, strict=True)}
        owned = [(a, copies.get(a.group.id, NO_PAGE)) for a in pages.attention]
        is_published = publish_partial(store, parent, tail, [*owned, (self._states, self.slot)])
        for attention, new in zip(copied, made, strict=True):
            attention.pool.release(new)
        return is_published


def _shared_states(pages: SequencePages) -> GroupPages:
    shared = [
        states
        for states in pages.states
        if states.group.life_cycle.policy is not ReusePolicy.PRIVATE
    ]
    invariant(len(shared) == 1, f"expected one shared recurrent group, got {len(shared)}")
    return shared[0]
