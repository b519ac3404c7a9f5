"""Pools and prefix tree together: the operations that keep both in step.

Internal to the package; the manager and its sequences share one. Eviction happens in
:meth:`CacheStore.make_room` and nowhere else, and nothing it does takes device slots, so it is
never re-entrant. An attached node always has the pages of all full REQUIRED groups: when one of
those goes, the node and everything below it go too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from kvcache_core.counters import CacheCounters
from kvcache_core.errors import invariant
from kvcache_core.events import EventLog
from kvcache_core.groups import LayerGroup
from kvcache_core.layout import LayoutPlan
from kvcache_core.pages import NO_NODE, NO_PAGE, PagePool, divided
from kvcache_core.ports import PageCopier
from kvcache_core.slots import Numbers, Rows, Slots, rows_of
from kvcache_core.spec import ReusePolicy
from kvcache_core.tree import Flags, PrefixTree


class PageUser(Protocol):
    """A sequence or a lease, as checks see it."""

    def used_pages(self) -> Iterable[tuple[int, Slots]]:
        """(pool group, pages) it holds or pins, each page once per hold."""
        ...

    def check(self) -> None:
        """Raise InvariantViolation when it contradicts itself."""
        ...

    def tip(self) -> int:
        """The node a sequence ends at; NO_NODE for leases and for sequences without one."""
        ...


class CacheStore:
    """State shared by one manager, its sequences and its leases."""

    def __init__(
        self,
        plan: LayoutPlan,
        slots: Sequence[int],
        host_slots: Sequence[int],
        copier: PageCopier,
        incarnation: str,
        resume_watermark: float,
    ) -> None:
        self.plan = plan
        self.tokens_per_block = plan.tokens_per_block
        self.groups = plan.layer_groups
        self.pools = tuple(PagePool(*counts) for counts in zip(slots, host_slots, strict=True))
        self.pool_of = tuple(self.pools[group.pool_group] for group in self.groups)
        self.vital = tuple(
            group.life_cycle.is_full and group.life_cycle.policy is ReusePolicy.REQUIRED
            for group in self.groups
        )
        pools = [
            group.pool_group for group, vital in zip(self.groups, self.vital, strict=True) if vital
        ]
        self._may_repeat = len(set(pools)) < len(pools)
        """Whether one pool group may hold two pages without which a node is lost."""
        self._is_vital = np.array(self.vital, dtype=np.bool_)
        self.copier = copier
        self.tree = self._empty_tree()
        self.events = EventLog(incarnation)
        self.counters = CacheCounters()
        self.sequences: dict[int, PageUser] = {}
        self.leases: dict[int, PageUser] = {}
        self.in_flight: Counter[bytes] = Counter()
        """Keys of blocks that open sequences have announced to compute."""
        self._resume_watermark = resume_watermark
        self._next_id = 0

    @property
    def is_crowded(self) -> bool:
        """True while a pool is in use beyond the watermark for suspended sequences."""
        return any(pool.utilisation > self._resume_watermark for pool in self.pools)

    def new_id(self) -> int:
        """A number no other sequence or lease of this store has."""
        self._next_id += 1
        return self._next_id

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until ``needs`` device slots are free in each pool group; False and unchanged if
        never.
        """
        pools = self.pools
        for pool, need in zip(pools, needs, strict=True):
            if need > pool.available:
                return False
        if all(need <= pool.device.free for pool, need in zip(pools, needs, strict=True)):
            return True
        cached = self._cached()
        try:
            for pool_group, need in enumerate(needs):
                while pools[pool_group].device.free < need:
                    self._evict(pool_group, need - pools[pool_group].device.free)
        finally:
            self.counters.pages_evicted += cached - self._cached()
        return True

    def create(self, group: LayerGroup, count: int, after: int | None, priority: int) -> Slots:
        """New pages of ``group`` with one holder each; make_room has been called."""
        self.counters.pages_created += count
        return self.pool_of[group.id].create(count, after, group.id, priority)

    def copy(self, group: LayerGroup, sources: Slots, targets: Slots) -> None:
        """Copy the bytes of pages, wherever they lie, to device pages of the same layer group."""
        devices = self.pool_of[group.id].num_device_slots
        on_host = sources >= devices
        if not on_host.all():
            self.copier.copy_slots(group.pool_group, sources[~on_host], targets[~on_host])
            self.counters.pages_copied += int(np.count_nonzero(~on_host))
        if on_host.any():
            hosted = sources[on_host] - np.int32(devices)
            self.copier.onboard_slots(group.pool_group, hosted, targets[on_host])
            self.counters.pages_onboarded += len(hosted)

    def publish(self, group: LayerGroup, pages: Slots, nodes: Numbers) -> None:
        """Give pages to the tree as those of ``group`` in ``nodes``, which have none."""
        pool, rows = self.pool_of[group.id], rows_of(pages)
        known = pool.node[rows] != NO_NODE
        invariant(not np.count_nonzero(known), "a published page is in the tree already")
        self.tree.pages[group.id][rows_of(nodes)] = pages
        pool.node[rows] = nodes

    def lose(self, pool_group: int, pages: Numbers) -> None:
        """Take pages out of the tree, with everything that is useless without them."""
        self._report_removed(self._lose(pool_group, rows_of(pages)))

    def move_tip(self, old: int, new: int) -> None:
        """A sequence now ends at ``new`` instead of ``old``; NO_NODE is nowhere."""
        if new != NO_NODE:
            self.tree.add_tip(new)
        if old != NO_NODE:
            self.tree.remove_tip(old)
            self.prune(old)

    def prune(self, node: int) -> None:
        """Detach ``node`` and its ancestors as far as nobody needs them."""
        self._report_removed(self.tree.prune(node))

    def remove_covered(self, node: int) -> None:
        """Drop partial siblings that ``node`` makes useless, unless they hold a snapshot."""
        states = [group.id for group in self.groups if group.life_cycle.is_state]
        for sibling in self.tree.covered_by(node):
            if not (self.tree.pages[states, sibling] != NO_PAGE).any():
                alone = np.array([sibling])
                self._report_removed(self._drop(alone, self.tree.has_parent_in(alone)))

    def clear(self) -> None:
        """Empty the tree. Sequences keep their pages and stop publishing."""
        tree = self.tree
        members = np.array(tree.roots() + tree.nodes(), dtype=np.intp)
        self._forget_pages(members)
        tree.detach(members, tree.has_parent_in(members))
        self.events.cleared()

    def reserve(self) -> tuple[int, ...]:
        """Take one device slot of each pool group out of circulation for good."""
        invariant(self.make_room([1] * len(self.pools)), "no free slot for padding rows")
        return tuple(int(pool.reserve()) for pool in self.pools)

    def tell_everything(self) -> None:
        """Put the whole tree into the event log, as if it were stored anew."""
        self.events.begin_truth()
        for root in self.tree.roots():
            for above, keys in self.tree.chains(root):
                self.events.stored(above, keys)
        self.events.end_truth()

    def _empty_tree(self) -> PrefixTree:
        vital = [
            pool.num_device_slots + pool.host.num_slots
            for pool, vital in zip(self.pool_of, self.vital, strict=True)
            if vital
        ]
        return PrefixTree(len(self.groups), self.tokens_per_block, min(vital, default=0))

    def _evict(self, pool_group: int, count: int) -> None:
        """Make at least one device page less cached: on the host where there is room, else lost."""
        pool = self.pools[pool_group]
        victims = self._make_host_room(pool_group, pool.device_queue.first(count))
        room = min(len(victims), pool.host.free)
        if room:
            # The coldest are lost if the host cannot take all.
            self._demote(pool_group, victims[len(victims) - room :])
        self.lose(pool_group, victims[: len(victims) - room])

    def _make_host_room(self, pool_group: int, pages: Rows) -> Rows:
        """Lose colder host pages for device pages of one priority; returns those still cached.

        What is on the host and deserves more stays there.
        """
        pool = self.pools[pool_group]
        while pool.host.free < len(pages) and pool.host_queue.count:
            coldest = pool.host_queue.first(len(pages) - pool.host.free)
            if pool.priority[coldest[0]] > pool.priority[pages[0]]:
                break
            self.lose(pool_group, coldest)
            pages = pool.still_cached(pages)
        return pages

    def _demote(self, pool_group: int, pages: Numbers) -> None:
        """Move cached device pages to free host slots."""
        pool, rows = self.pools[pool_group], rows_of(pages)
        targets = pool.host.take(len(rows))
        try:
            devices = np.int32(pool.num_device_slots)
            pages = rows.astype(np.int32)
            self.copier.demote_slots(pool_group, pages, targets - devices)
        except BaseException:
            pool.host.give(targets)
            raise
        groups, nodes = pool.group[rows], pool.node[rows]
        pool.put_on_host(rows, targets)
        self.tree.pages[groups, nodes] = targets
        self.counters.pages_demoted += len(rows)

    def _lose(self, pool_group: int, pages: Rows) -> list[bytes]:
        """Returns the keys of the full blocks that went."""
        pool = self.pools[pool_group]
        vital, minor = divided(pages, self._is_vital[pool.group[pages]])
        removed: list[bytes] = []
        if len(vital):
            removed += self._drop_all(rows_of(pool.node[vital]))
            minor = minor[pool.node[minor] != NO_NODE]  # not gone with a vital page
        if len(minor):
            removed += self._lose_minor(pool, minor)
        return removed

    def _lose_minor(self, pool: PagePool, pages: Rows) -> list[bytes]:
        """Take pages out of blocks that may live without them. Only where no page is vital, a block
        may have lost its last.
        """
        tree, groups, nodes = self.tree, pool.group[pages], pool.node[pages]
        pool.forget(pages)
        tree.pages[groups, nodes] = NO_PAGE
        removed: list[bytes] = []
        if not any(self.vital):
            for node in nodes[tree.are_bare(nodes)].tolist():
                removed += tree.prune(node)
        return removed

    def _drop_all(self, nodes: Rows) -> list[bytes]:
        """Remove nodes and their subtrees; pages come deepest first, so do their nodes."""
        tree = self.tree
        if self._may_repeat:
            nodes = np.array(list(dict.fromkeys(nodes.tolist())))
        # Every child inside has its parent inside: as many as there are children in all?
        inside = tree.has_parent_in(nodes)
        if tree.children.counts[nodes].sum() == np.count_nonzero(inside):
            return self._drop(nodes, inside)
        removed: list[bytes] = []
        for node in nodes.tolist():
            if tree.attached[node]:
                below = np.array(tree.subtree(node))
                removed += self._drop(below, tree.has_parent_in(below))
        return removed

    def _drop(self, nodes: Rows, inside: Flags) -> list[bytes]:
        """Remove nodes, all their descendants among them; ``inside`` tells whose parent is one of
        them. Returns the keys of the full ones.
        """
        outside = set(self.tree.parent[nodes[~inside]].tolist())
        self._forget_pages(nodes)
        removed = self.tree.detach(nodes, inside)
        for parent in sorted(outside - {NO_NODE}):
            removed += self.tree.prune(parent)
        return removed

    def _forget_pages(self, nodes: Rows) -> None:
        for table, pool in zip(self.tree.pages, self.pool_of, strict=True):
            pages = rows_of(table[nodes])
            known, _ = divided(pages, pages != NO_PAGE)
            if len(known):
                table[nodes] = NO_PAGE
                pool.forget(known)

    def _cached(self) -> int:
        return sum(pool.device_queue.count + pool.host_queue.count for pool in self.pools)

    def _report_removed(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.counters.blocks_removed += len(keys)
            self.events.removed(keys)
