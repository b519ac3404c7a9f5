"""All pages of one sequence, over all layer groups, and how they change together.

Every change is all or nothing: room is made for everything first, copies are made next, and only
then do tables change. Blocks from ``private_from`` on are this sequence's alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.arithmetic import ceil_div
from kvcache_core.errors import invariant
from kvcache_core.group_pages import GroupPages
from kvcache_core.matching import Match
from kvcache_core.pages import Page
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore

Fresh = tuple[int, Page | None]
"""A block that gets a new page, and the page whose bytes it starts with."""


class SequencePages:
    """``blocks`` ordinals with pages in each attention group; one live state in each recurrent."""

    def __init__(self, store: CacheStore, priority: int) -> None:
        self._store = store
        self._priority = priority
        self.groups = tuple(GroupPages(group) for group in store.groups)
        self.attention = tuple(g for g in self.groups if not g.group.life_cycle.is_state)
        self.states = tuple(g for g in self.groups if g.group.life_cycle.is_state)
        self._windowed = tuple(g for g in self.attention if not g.group.life_cycle.is_full)
        self.blocks = 0
        self.private_from = 0
        self._is_unfilled = False

    def attach(self, match: Match) -> None:
        """Hold the pages of a match; there are none before."""
        store = self._store
        self.blocks = self.private_from = len(match.blocks)
        for pages in self.groups:
            cycle, index = pages.group.life_cycle, pages.group.id
            if not match.complete[index]:
                pages.append([None] * (0 if cycle.is_state else self.blocks))
                self._mark_unfilled(pages)
                continue
            nodes = match.blocks[-1:] if cycle.is_state else match.blocks
            held = [node.pages[index] for node in nodes]
            start, end = cycle.stale_range(match.tokens, store.tokens_per_block)
            held[start:end] = [None] * (end - start)
            pages.stale_end = max(pages.stale_end, end)
            for page in held:
                if page is not None:
                    store.hold(page)
                    page.priority = max(page.priority, self._priority)
            pages.append(held)

    def decline(self, group: int) -> None:
        """Give the matched pages of one group up, to be written anew."""
        pages = self.groups[group]
        for ordinal in reversed(range(len(pages.pages))):
            self.release(pages.drop(ordinal))
        self._mark_unfilled(pages)

    def _mark_unfilled(self, pages: GroupPages) -> None:
        pages.unfilled = self.blocks > 0
        pages.publish_from = self.blocks
        self._is_unfilled = self._is_unfilled or pages.unfilled

    def extend(self, history: int, blocks: int, live_at: int) -> bool:
        """Pages for ``blocks`` blocks, private from ``history`` on; False and unchanged if short.

        Blocks that are stale at ``live_at`` tokens get none.
        """
        tokens_per_block = self._store.tokens_per_block
        first = history // tokens_per_block
        is_private = first >= min(self.private_from, self.blocks)
        if blocks <= self.blocks and is_private and not self._is_unfilled and self._states_ready():
            return True
        blocks = max(blocks, self.blocks)
        is_partial = history % tokens_per_block > 0
        orders = [
            (pages, self._fresh(pages, first, blocks, live_at, copy_first=is_partial))
            for pages in self.groups
        ]
        made = self.allocate(orders)
        if made is None:
            return False
        committed_end = live_at // tokens_per_block
        self._is_unfilled = False
        for (pages, fresh), new in zip(orders, made, strict=True):
            if not pages.group.life_cycle.is_state:
                pages.append([None] * (blocks - len(pages.pages)))
            elif not pages.pages:
                pages.append([None])
            for (ordinal, _), page in zip(fresh, new, strict=True):
                self.release(pages.put(ordinal, page))
            pages.unfilled = committed_end > first and pages in self._windowed
            self._is_unfilled = self._is_unfilled or pages.unfilled
        self.blocks = blocks
        self.private_from = min(self.private_from, first)
        return True

    def allocate(self, orders: Sequence[tuple[GroupPages, list[Fresh]]]) -> list[list[Page]] | None:
        """New pages for each order, copies made; None and nothing changed when one is missing."""
        store = self._store
        needs = [0] * len(store.pools)
        for pages, fresh in orders:
            needs[pages.group.pool_group] += len(fresh)
        if any(needs) and not store.make_room(needs):
            return None
        made: list[list[Page]] = []
        for pages, fresh in orders:
            before = pages.last(fresh[0][0]) if fresh else None
            made.append(store.create(pages.group, len(fresh), before, self._priority))
        try:
            for (_, fresh), new in zip(orders, made, strict=True):
                for (_, source), page in zip(fresh, new, strict=True):
                    if source is not None:
                        store.copy(source, page)
        except BaseException:
            for page in reversed([page for new in made for page in new]):
                store.release(page)
            raise
        return made

    def fork(self, history: int) -> SequencePages | None:
        """Pages of a second sequence: full blocks shared, the partial block and states copied."""
        full, rest = divmod(history, self._store.tokens_per_block)
        copied = [(pages, full) for pages in self.attention if rest]
        copied += [(pages, 0) for pages in self.states if pages.pages]
        orders = [
            (pages, [(ordinal, pages.pages[ordinal])])
            for pages, ordinal in copied
            if pages.pages[ordinal] is not None
        ]
        made = self.allocate(orders)
        if made is None:
            return None
        copies = {pages.group.id: new[0] for (pages, _), new in zip(orders, made, strict=True)}
        child = SequencePages(self._store, self._priority)
        child.blocks = full + (rest > 0)
        child.private_from = full
        child._is_unfilled = self._is_unfilled
        for mine, theirs in zip(self.groups, child.groups, strict=True):
            theirs.stale_end, theirs.publish_from = mine.stale_end, mine.publish_from
            theirs.unfilled = mine.unfilled
            copy = copies.get(mine.group.id)
            if mine.group.life_cycle.is_state:
                theirs.append([copy] if mine.pages else [])
                continue
            shared = mine.pages[:full]
            for page in shared:
                if page is not None:
                    self._store.hold(page)
            theirs.append([*shared, copy] if rest else shared)
        self.private_from = max(self.private_from, full)
        return child

    def drop_stale(self, tokens: int) -> None:
        """Release blocks of windowed groups that no token at ``tokens`` or later can see."""
        for pages in self._windowed:
            _, end = pages.group.life_cycle.stale_range(tokens, self._store.tokens_per_block)
            for ordinal in range(pages.stale_end, end):
                self.release(pages.drop(ordinal))
            pages.stale_end = max(pages.stale_end, end)

    def release_all(self) -> None:
        """Release every page, deepest block first, so that leaves are evicted before parents."""
        for ordinal in reversed(range(self.blocks)):
            for pages in self.attention:
                self.release(pages.drop(ordinal))
        for pages in self.states:
            for index in range(len(pages.pages)):
                self.release(pages.drop(index))

    def release(self, page: Page | None) -> None:
        """Release one page, if there is one."""
        if page is not None:
            self._store.release(page)

    def transferable(
        self, first_block: int, end_block: int
    ) -> tuple[dict[int, npt.NDArray[np.int32]], list[Page]]:
        """Slots by layer group, and the pages, of a range of blocks that may leave this rank."""
        tables: dict[int, npt.NDArray[np.int32]] = {}
        leased: list[Page] = []
        for pages in self.groups:
            cycle = pages.group.life_cycle
            if cycle.policy is not ReusePolicy.PRIVATE:
                span = slice(None) if cycle.is_state else slice(first_block, end_block)
                tables[pages.group.id] = pages.table()[span].copy()
                leased += [page for page in pages.pages[span] if page is not None]
        return tables, leased

    def used(self) -> list[Page]:
        """Every page, once per group and block."""
        return [page for pages in self.groups for page in pages.pages if page is not None]

    def check(self, committed: int) -> None:
        """Raise InvariantViolation when pages, tables and extents disagree."""
        tokens_per_block = self._store.tokens_per_block
        for pages in self.groups:
            pages.check()
            cycle = pages.group.life_cycle
            if cycle.is_state:
                continue
            invariant(
                len(pages.pages) == self.blocks,
                f"layer group {pages.group.id} has {len(pages.pages)} blocks, not {self.blocks}",
            )
            if pages.unfilled:
                continue
            start, end = cycle.stale_range(committed, tokens_per_block)
            for ordinal, page in enumerate(pages.pages):
                is_stale = start <= ordinal < end
                invariant(
                    (page is None) == is_stale,
                    f"layer group {pages.group.id} block {ordinal}: stale {is_stale}, page {page}",
                )
                if ordinal >= self.private_from and page is not None:
                    invariant(
                        is_private(page),
                        f"layer group {pages.group.id} block {ordinal} is not private",
                    )

    def _states_ready(self) -> bool:
        return all(pages.pages and is_private(pages.pages[0]) for pages in self.states)

    def _fresh(
        self, pages: GroupPages, first: int, blocks: int, live_at: int, *, copy_first: bool
    ) -> list[Fresh]:
        """Which blocks of one group need new pages, ascending."""
        cycle = pages.group.life_cycle
        if cycle.is_state:
            source = pages.pages[0] if pages.pages else None
            return [] if is_private(source) else [(0, source)]
        existing = len(pages.pages)
        start, end = cycle.stale_range(live_at, self._store.tokens_per_block)
        fresh: list[Fresh] = []
        for ordinal in range(0 if pages.unfilled else min(first, existing), existing):
            page = pages.pages[ordinal]
            if page is None:
                if pages.unfilled and not start <= ordinal < end:
                    fresh.append((ordinal, None))
            elif first <= ordinal < self.private_from and not is_private(page):
                fresh.append((ordinal, page if copy_first and ordinal == first else None))
        fresh += [
            (ordinal, None) for ordinal in range(existing, blocks) if not start <= ordinal < end
        ]
        return fresh


def is_private(page: Page | None) -> bool:
    """True for a page that one sequence alone knows."""
    return page is not None and page.holders == 1 and page.node is None


def blocks_for(tokens: int, store: CacheStore) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return ceil_div(tokens, store.tokens_per_block)
