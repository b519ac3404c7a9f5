"""Pools and prefix tree together: the operations that keep both in step.

Internal to the package; the manager and its sequences share one. Eviction happens in
:meth:`CacheStore.make_room` and nowhere else, and nothing it does allocates, so it is never
re-entrant. An attached node always has the pages of all full REQUIRED groups: when one of those
goes, the node and everything below it go too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvcache_core.counters import CacheCounters
from kvcache_core.errors import invariant
from kvcache_core.events import EventLog
from kvcache_core.groups import LayerGroup
from kvcache_core.layout import LayoutPlan
from kvcache_core.pages import Page, PagePool
from kvcache_core.ports import PageCopier
from kvcache_core.spec import ReusePolicy
from kvcache_core.tree import Node, PrefixTree


class PageUser(Protocol):
    """A sequence or a lease, as checks see it."""

    def used_pages(self) -> Iterable[Page]:
        """Every page it holds or pins, once per hold."""
        ...

    def check(self) -> None:
        """Raise InvariantViolation when it contradicts itself."""
        ...

    def tip(self) -> Node | None:
        """The node a sequence ends at; None for leases."""
        ...


class CacheStore:
    """State shared by one manager, its sequences and its leases."""

    def __init__(
        self, plan: LayoutPlan, slots: Sequence[int], copier: PageCopier, incarnation: str
    ) -> None:
        self.plan = plan
        self.tokens_per_block = plan.tokens_per_block
        self.groups = plan.layer_groups
        self.pools = tuple(PagePool(count) for count in slots)
        self.pool_of = tuple(self.pools[group.pool_group] for group in self.groups)
        self.vital = tuple(
            group.life_cycle.is_full and group.life_cycle.policy is ReusePolicy.REQUIRED
            for group in self.groups
        )
        self.copier = copier
        self.tree = PrefixTree(len(self.groups))
        self.events = EventLog(incarnation)
        self.counters = CacheCounters()
        self.sequences: dict[int, PageUser] = {}
        self.leases: dict[int, PageUser] = {}
        self._next_id = 0

    def new_id(self) -> int:
        """A number no other sequence or lease of this store has."""
        self._next_id += 1
        return self._next_id

    def hold(self, page: Page) -> None:
        """One more sequence uses ``page``."""
        self.pool_of[page.layer_group].hold(page)

    def release(self, page: Page) -> None:
        """One sequence less uses ``page``; nobody left frees it or makes it evictable."""
        self.pool_of[page.layer_group].release(page)

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until ``needs`` slots are free in each pool group; False and unchanged if never."""
        pools = self.pools
        for pool, need in zip(pools, needs, strict=True):
            if need > pool.available:
                return False
        removed: list[Node] = []
        cached = sum(pool.cached for pool in pools)
        for pool, need in zip(pools, needs, strict=True):
            while pool.slots.free < need:
                removed.extend(self._lose(pool.victim()))
        self.counters.pages_evicted += cached - sum(pool.cached for pool in pools)
        self._report_removed(removed)
        return True

    def create(
        self, group: LayerGroup, count: int, after: Page | None, priority: int
    ) -> list[Page]:
        """New pages of ``group`` with one holder each; make_room has been called."""
        self.counters.pages_created += count
        pool = self.pool_of[group.id]
        return pool.create(count, None if after is None else after.slot, group.id, priority)

    def copy(self, source: Page, target: Page) -> None:
        """Copy the bytes of a page to another of the same layer group."""
        pool_group = self.groups[source.layer_group].pool_group
        self.copier.copy_slot(pool_group, source.slot, target.slot)
        self.counters.pages_copied += 1

    def publish(self, page: Page, node: Node) -> None:
        """Give ``page`` to the tree as the page of its layer group in ``node``."""
        invariant(page.node is None, f"slot {page.slot} is in the tree already")
        node.pages[page.layer_group] = page
        page.node = node

    def lose(self, page: Page) -> None:
        """Take one page out of the tree, with everything that is useless without it."""
        self._report_removed(self._lose(page))

    def move_tip(self, old: Node | None, new: Node | None) -> None:
        """A sequence now ends at ``new`` instead of ``old``."""
        if new is not None:
            new.tips += 1
        if old is not None:
            old.tips -= 1
            self.prune(old)

    def prune(self, node: Node) -> None:
        """Detach ``node`` and its ancestors as far as nobody needs them."""
        self._report_removed(self.tree.prune(node))

    def remove_covered(self, node: Node) -> None:
        """Drop partial siblings that ``node`` makes useless, unless they hold a snapshot."""
        for sibling in self.tree.covered_by(node):
            if not any(page is not None and self._is_state(page) for page in sibling.pages):
                self._report_removed(self._drop(sibling))

    def clear(self) -> None:
        """Empty the tree. Sequences keep their pages and stop publishing."""
        for node in self.tree.nodes():
            self._forget_pages(node)
            node.attached = False
        for root in self.tree.roots():
            root.attached = False
        self.tree = PrefixTree(len(self.groups))
        self.events.cleared()

    def _is_state(self, page: Page) -> bool:
        return self.groups[page.layer_group].life_cycle.is_state

    def _lose(self, page: Page) -> list[Node]:
        node = page.node
        invariant(node is not None, f"slot {page.slot} is not in the tree")
        assert node is not None
        if self.vital[page.layer_group]:
            return self._drop(node)
        node.pages[page.layer_group] = None
        self.pool_of[page.layer_group].forget(page)
        return self.tree.prune(node)

    def _drop(self, node: Node) -> list[Node]:
        """Remove a node and its subtree; returns all that are gone."""
        nodes = self.tree.subtree(node)
        for member in reversed(nodes):
            self._forget_pages(member)
            self.tree.detach(member)
        return nodes + self.tree.prune(node.parent)

    def _forget_pages(self, node: Node) -> None:
        for group, page in enumerate(node.pages):
            if page is not None:
                node.pages[group] = None
                self.pool_of[group].forget(page)

    def _report_removed(self, nodes: Sequence[Node]) -> None:
        keys = [
            node.key
            for node in nodes
            if node.parent is not None and node.length == self.tokens_per_block
        ]
        if keys:
            self.counters.blocks_removed += len(keys)
            self.events.removed(keys)
