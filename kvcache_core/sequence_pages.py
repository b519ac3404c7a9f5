"""All pages of one sequence, over all layer groups, and how they change together.

Every change is all or nothing: room is made for everything first, copies are made next, and only
then do tables change. Blocks from ``private_from`` on are this sequence's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_core.arithmetic import ceil_div
from kvcache_core.errors import invariant
from kvcache_core.group_pages import GroupPages
from kvcache_core.matching import Match
from kvcache_core.pages import NO_PAGE
from kvcache_core.priorities import PagePriorities
from kvcache_core.slots import Slots
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore

Ordinals = npt.NDArray[np.int64]
NO_ORDINALS: Ordinals = np.empty(0, dtype=np.int64)
NO_SOURCES: Slots = np.empty(0, dtype=np.int32)
NOTHING = range(0)


@dataclass(frozen=True, eq=False)
class Order:
    """Blocks of one group that get new pages, ascending: ``ordinals`` with the pages whose bytes
    they start with, NO_PAGE for none, and then ``appended``, which have had no page yet.
    """

    pages: GroupPages
    ordinals: Ordinals
    sources: Slots
    appended: range

    @classmethod
    def appending(cls, pages: GroupPages, appended: range) -> Order:
        """An order of nothing but these."""
        return cls(pages, NO_ORDINALS, NO_SOURCES, appended)

    @property
    def count(self) -> int:
        """How many pages are ordered."""
        return len(self.ordinals) + len(self.appended)

    @property
    def first(self) -> int:
        """The first block of an order that is not empty."""
        return int(self.ordinals[0]) if len(self.ordinals) else self.appended.start


class SequencePages:
    """``blocks`` ordinals with pages in each attention group; one live state in each recurrent."""

    def __init__(self, store: CacheStore, priorities: PagePriorities) -> None:
        self._store = store
        self._priorities = priorities
        self.groups = tuple(
            GroupPages(group, pool) for group, pool in zip(store.groups, store.pool_of, strict=True)
        )
        self.attention = tuple(g for g in self.groups if not g.group.life_cycle.is_state)
        self.states = tuple(g for g in self.groups if g.group.life_cycle.is_state)
        self._windowed = tuple(g for g in self.attention if not g.group.life_cycle.is_full)
        self.blocks = 0
        self.private_from = 0
        self._is_unfilled = False
        self._on_host = False

    @property
    def is_resident(self) -> bool:
        """True when every page lies on the device."""
        return not self._on_host

    def attach(self, match: Match) -> int:
        """Hold the pages of a match; there are none before. Returns how many of its tokens are in
        blocks with a page on the host.
        """
        store = self._store
        self.blocks = self.private_from = len(match.nodes)
        if not self.blocks:
            return 0
        hosted = np.zeros(self.blocks, dtype=np.bool_)
        for pages in self.groups:
            cycle, index = pages.group.life_cycle, pages.group.id
            if not match.complete[index]:
                pages.resize(0 if cycle.is_state else self.blocks)
                self._mark_unfilled(pages)
                continue
            nodes = match.nodes[-1:] if cycle.is_state else match.nodes
            pages.resize(len(nodes))
            held = store.tree.pages[index, nodes]
            start, end = cycle.stale_range(match.tokens, store.tokens_per_block)
            held[start:end] = NO_PAGE
            pages.stale_end = max(pages.stale_end, end)
            pages.pages[:] = held
            used = held[held != NO_PAGE]
            pages.pool.hold(used)
            pages.pool.raise_priority(used, self._priorities.of(pages.group))
            on_host = held >= pages.pool.num_device_slots
            pages.on_host = bool(on_host.any())
            self._on_host = self._on_host or pages.on_host
            hosted[-1 if cycle.is_state else 0 :] |= on_host
        size = store.tokens_per_block
        lengths = np.minimum(match.tokens - size * np.arange(self.blocks), size)
        return int(lengths[hosted].sum())

    def decline(self, group: int) -> None:
        """Give the matched pages of one group up, to be written anew."""
        pages = self.groups[group]
        pages.pool.release(pages.take(0, pages.size))
        if pages.group.life_cycle.is_state:
            pages.resize(0)
        pages.on_host = False
        self._mark_unfilled(pages)

    def _mark_unfilled(self, pages: GroupPages) -> None:
        pages.unfilled = self.blocks > 0
        pages.publish_from = self.blocks
        self._is_unfilled = self._is_unfilled or pages.unfilled

    def extend(self, history: int, blocks: int, live_at: int) -> bool:
        """Pages for ``blocks`` blocks, on the device and private from ``history`` on; False and
        unchanged if short.

        Blocks that are stale at ``live_at`` tokens get none.
        """
        first = history // self._store.tokens_per_block
        is_private = first >= min(self.private_from, self.blocks)
        is_ready = is_private and not self._is_unfilled and not self._on_host
        if blocks <= self.blocks and is_ready and self._states_ready():
            return True
        blocks = max(blocks, self.blocks)
        is_partial = history % self._store.tokens_per_block > 0
        orders = [
            self._order(pages, first, blocks, live_at, copy_first=is_partial)
            for pages in self.groups
        ]
        made = self.allocate(orders)
        if made is None:
            return False
        committed_end = live_at // self._store.tokens_per_block
        self._is_unfilled = self._on_host = False
        for order, new in zip(orders, made, strict=True):
            pages = order.pages
            pages.resize(max(1, pages.size) if pages.group.life_cycle.is_state else blocks)
            self._replace(order, new, first)
            pages.unfilled = committed_end > first and pages in self._windowed
            pages.on_host = False
            self._is_unfilled = self._is_unfilled or pages.unfilled
        self.blocks = blocks
        self.private_from = min(self.private_from, first)
        return True

    def _replace(self, order: Order, new: Slots, first: int) -> None:
        """Put new pages in place of old ones. What came from the host for reading goes back to the
        tree in its new place; what is to be written stays private.
        """
        pages, pool = order.pages, order.pages.pool
        replaced = len(order.ordinals)
        pages.pages[order.appended.start : order.appended.stop] = new[replaced:]
        if not replaced:
            return
        old, new = pages.pages[order.ordinals], new[:replaced]
        pages.pages[order.ordinals] = new
        if not np.count_nonzero(old != NO_PAGE):
            return
        if not pages.group.life_cycle.is_state:
            read = (order.ordinals < first) & (old >= pool.num_device_slots)
            nodes = pool.node[old[read]]
            known = nodes >= 0
            hosted, kept = old[read][known], new[read][known]
            if len(hosted):
                pool.move(hosted, kept)
                self._store.tree.pages[pages.group.id, nodes[known]] = kept
        pool.release(old[old != NO_PAGE][::-1])

    def allocate(self, orders: Sequence[Order]) -> list[Slots] | None:
        """New pages for each order, copies made; None and nothing changed when one is missing."""
        store = self._store
        needs = [0] * len(store.pools)
        for order in orders:
            needs[order.pages.group.pool_group] += order.count
        if any(needs) and not store.make_room(needs):
            return None
        made: list[Slots] = []
        for order in orders:
            pages, count = order.pages, order.count
            before = pages.before(order.first) if count else None
            made.append(store.create(pages.group, count, before, self._priorities.of(pages.group)))
        try:
            for order, new in zip(orders, made, strict=True):
                has_source = order.sources != NO_PAGE
                if np.count_nonzero(has_source):
                    targets = new[: len(has_source)][has_source]
                    store.copy(order.pages.group, order.sources[has_source], targets)
        except BaseException:
            for order, new in zip(orders, made, strict=True):
                order.pages.pool.release(new[::-1])
            raise
        return made

    def fork(self, history: int) -> SequencePages | None:
        """Pages of a second sequence: full blocks shared, the partial block and states copied."""
        full, rest = divmod(history, self._store.tokens_per_block)
        copied = [(pages, full) for pages in self.attention if rest]
        copied += [(pages, 0) for pages in self.states if pages.size]
        orders = [
            self.copy_order(pages, ordinal)
            for pages, ordinal in copied
            if pages.pages[ordinal] != NO_PAGE
        ]
        made = self.allocate(orders)
        if made is None:
            return None
        copies = {o.pages.group.id: new[0] for o, new in zip(orders, made, strict=True)}
        child = SequencePages(self._store, self._priorities)
        child.blocks = full + (rest > 0)
        child.private_from = full
        child._is_unfilled, child._on_host = self._is_unfilled, self._on_host
        for mine, theirs in zip(self.groups, child.groups, strict=True):
            theirs.stale_end, theirs.publish_from = mine.stale_end, mine.publish_from
            theirs.unfilled, theirs.on_host = mine.unfilled, mine.on_host
            copy = copies.get(mine.group.id, NO_PAGE)
            if mine.group.life_cycle.is_state:
                theirs.resize(mine.size)
                theirs.pages[:] = copy
                continue
            theirs.resize(child.blocks)
            theirs.pages[:full] = mine.pages[:full]
            mine.pool.hold(theirs.used)
            theirs.pages[full:] = copy
        self.private_from = max(self.private_from, full)
        return child

    @staticmethod
    def copy_order(pages: GroupPages, ordinal: int) -> Order:
        """The order of one more page with the bytes of a block."""
        ordinals = np.array([ordinal], dtype=np.int64)
        return Order(pages, ordinals, pages.pages[ordinals], NOTHING)

    def expect_rewrite(self, history: int, end: int) -> None:
        """KV of tokens ``[history, end)`` will be written again: elsewhere, where a transfer may
        read it.
        """
        if not self._store.leases or history == end:
            return
        first, stop = history // self._store.tokens_per_block, blocks_for(end, self._store)
        spans = ((pages.pool, pages.pages[first:stop]) for pages in self.attention)
        if any(pool.leases[span[span != NO_PAGE]].any() for pool, span in spans):
            self.private_from = max(self.private_from, stop)

    def drop_stale(self, tokens: int) -> None:
        """Release blocks of windowed groups that no token at ``tokens`` or later can see."""
        for pages in self._windowed:
            _, end = pages.group.life_cycle.stale_range(tokens, self._store.tokens_per_block)
            if end > pages.stale_end:
                pages.pool.release(pages.take(pages.stale_end, end))
                pages.stale_end = end

    def release_all(self) -> None:
        """Release every page, deepest block first, so that leaves are evicted before parents."""
        for pages in (*self.attention, *self.states):
            pages.pool.release(pages.take(0, pages.size))

    def transferable(
        self, first_block: int, end_block: int
    ) -> tuple[dict[int, Slots], dict[int, Slots]]:
        """Slots by layer group with gaps, and pages without, of blocks that may leave this rank."""
        tables: dict[int, Slots] = {}
        leased: dict[int, Slots] = {}
        for pages in self.groups:
            cycle = pages.group.life_cycle
            if cycle.policy is not ReusePolicy.PRIVATE:
                span = slice(None) if cycle.is_state else slice(first_block, end_block)
                table = pages.pages[span].copy()
                tables[pages.group.id] = table
                leased[pages.group.id] = table[table != NO_PAGE]
        return tables, leased

    def check(self, committed: int) -> None:
        """Raise InvariantViolation when pages, tables and extents disagree."""
        tokens_per_block = self._store.tokens_per_block
        for pages in self.groups:
            cycle, index = pages.group.life_cycle, pages.group.id
            invariant(
                pages.on_host or not len(pages.hosted), f"layer group {index} has hosted pages"
            )
            if cycle.is_state:
                continue
            invariant(
                pages.size == self.blocks,
                f"layer group {index} has {pages.size} blocks, not {self.blocks}",
            )
            if pages.unfilled:
                continue
            start, end = cycle.stale_range(committed, tokens_per_block)
            for ordinal, page in enumerate(pages.pages.tolist()):
                is_stale = start <= ordinal < end
                invariant(
                    (page == NO_PAGE) == is_stale,
                    f"layer group {index} block {ordinal}: stale {is_stale}, page {page}",
                )
                if ordinal >= self.private_from and page != NO_PAGE:
                    alone = pages.pool.is_private(np.array([page], dtype=np.int32))[0]
                    invariant(alone, f"layer group {index} block {ordinal} is not private")

    def _states_ready(self) -> bool:
        return all(pages.size and pages.pool.is_writable(pages.pages)[0] for pages in self.states)

    def _order(
        self, pages: GroupPages, first: int, blocks: int, live_at: int, *, copy_first: bool
    ) -> Order:
        """Which blocks of one group need new pages."""
        cycle, pool, existing = pages.group.life_cycle, pages.pool, pages.size
        if cycle.is_state:
            if existing and pool.is_writable(pages.pages)[0]:
                return Order.appending(pages, NOTHING)
            return self.copy_order(pages, 0) if existing else Order.appending(pages, range(1))
        start, end = cycle.stale_range(live_at, self._store.tokens_per_block)
        appended, sinks = range(existing, blocks), NO_ORDINALS
        if existing < end:
            appended, sinks = range(end, blocks), np.arange(existing, max(existing, start))
        is_settled = not pages.unfilled and not pages.on_host
        if is_settled and first >= min(existing, self.private_from):
            if not len(sinks):
                return Order.appending(pages, appended)
            return Order(pages, sinks, np.full(len(sinks), NO_PAGE, dtype=np.int32), appended)
        begin = 0 if pages.unfilled or pages.on_host else min(first, existing)
        ordinals = np.arange(begin, existing)
        span = pages.pages[begin:existing]
        missing = span == NO_PAGE
        sources = np.full(len(span), NO_PAGE, dtype=np.int32)
        fresh = np.zeros(len(span), dtype=np.bool_)
        if pages.unfilled:
            fresh |= missing & ((ordinals < start) | (ordinals >= end))
        if pages.on_host:
            hosted = (span >= pool.num_device_slots) & (ordinals < first)
            sources[hosted] = span[hosted]
            fresh |= hosted
        if first < min(existing, self.private_from):
            write = (ordinals >= first) & (ordinals < self.private_from) & ~missing
            write[write] = ~pool.is_unread(span[write])
            fresh |= write
            if copy_first and write[first - begin]:
                sources[first - begin] = span[first - begin]
        return Order(
            pages,
            np.concatenate((ordinals[fresh], sinks)),
            np.concatenate((sources[fresh], np.full(len(sinks), NO_PAGE, dtype=np.int32))),
            appended,
        )


def blocks_for(tokens: int, store: CacheStore) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return ceil_div(tokens, store.tokens_per_block)
