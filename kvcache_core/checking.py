"""Recomputes every invariant of a store from its parts. Slow on purpose; nothing here is cached."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache_core.errors import invariant
from kvcache_core.eviction import EvictionQueue
from kvcache_core.pages import FREE, NO_NODE, NO_PAGE, PagePool
from kvcache_core.slots import SlotAllocator
from kvcache_core.store import CacheStore

Occupied = set[tuple[int, int]]
"""(pool group, page)."""


def check_store(store: CacheStore) -> None:
    """Raise InvariantViolation on the first contradiction."""
    holders: Counter[tuple[int, int]] = Counter()
    leases: Counter[tuple[int, int]] = Counter()
    for users, counts in ((store.sequences, holders), (store.leases, leases)):
        for user in users.values():
            user.check()
            for pool_group, pages in user.used_pages():
                counts.update((pool_group, page) for page in pages.tolist())
    in_tree = _check_tree(store)
    announced = sum(store.in_flight.values())
    invariant(all(count > 0 for count in store.in_flight.values()), f"in flight: {announced}")
    for pool_group, pool in enumerate(store.pools):
        _check_slots(pool)
        for page, group in enumerate(pool.group.tolist()):
            key = (pool_group, page)
            story = f"page {page} of pool group {pool_group}"
            known = pool.node[page] != NO_NODE
            invariant(pool.holders[page] == holders[key], f"{story}: holders {pool.holders[page]}")
            invariant(pool.leases[page] == leases[key], f"{story}: leases {pool.leases[page]}")
            invariant(known == (key in in_tree), f"{story}: the tree disagrees")
            is_idle = known and not holders[key] and not leases[key]
            invariant(pool.cached[page] == is_idle, f"{story}: cached {pool.cached[page]}")
            is_used = known or holders[key] > 0 or leases[key] > 0
            invariant((group >= 0) == is_used, f"{story}: group {group}, used {is_used}")
            invariant(
                pool.quarantines[page] <= pool.leases[page], f"{story}: more doubts than pins"
            )
            if group >= 0:
                invariant(
                    store.groups[group].pool_group == pool_group, f"{story} is of group {group}"
                )


def _check_slots(pool: PagePool) -> None:
    devices = pool.num_device_slots
    free = np.flatnonzero(pool.group == FREE)
    _check_free(pool.device, free[free < devices].tolist())
    _check_free(pool.host, free[free >= devices].tolist())
    cached = np.flatnonzero(pool.cached)
    _check_queue(pool.device_queue, cached[cached < devices].tolist())
    _check_queue(pool.host_queue, cached[cached >= devices].tolist())
    leased = int(np.count_nonzero(pool.leases))
    invariant(pool.leased == leased, f"leased count {pool.leased}, got {leased}")
    doubted = int(np.count_nonzero(pool.quarantines))
    invariant(pool.quarantined == doubted, f"quarantined count {pool.quarantined}, got {doubted}")
    on_host = np.flatnonzero(pool.leases[devices:])
    invariant(not len(on_host), "a transfer may touch host pages")


def _check_free(slots: SlotAllocator, expected: list[int]) -> None:
    free = [slot for start, end in slots.runs() for slot in range(start, end)]
    invariant(free == expected, f"free runs {slots.runs()}, unoccupied slots {expected}")
    invariant(slots.free == len(free), f"free count {slots.free}, got {len(free)}")


def _check_queue(queue: EvictionQueue, expected: list[int]) -> None:
    ordered = queue.ordered()
    invariant(sorted(ordered) == expected, f"eviction queue {ordered}, cached pages {expected}")
    invariant(queue.count == len(expected), f"cached count {queue.count}, got {len(expected)}")


def _check_tree(store: CacheStore) -> Occupied:
    """Returns (pool group, page) of every page the tree knows."""
    tree = store.tree
    tips: Counter[int] = Counter(sequence.tip() for sequence in store.sequences.values())
    seen: Occupied = set()
    reachable = [node for root in tree.roots() for node in tree.subtree(root)]
    invariant(
        sorted(reachable) == sorted(tree.nodes() + tree.roots()),
        f"{len(reachable)} blocks below the roots, {len(tree.nodes())} in all",
    )
    for node in reachable:
        _check_node(store, node)
        invariant(tree.tips[node] == tips[node], f"tips {tree.tips[node]}, got {tips[node]}")
        for group, page in enumerate(tree.pages[:, node].tolist()):
            if page != NO_PAGE:
                pool = store.pool_of[group]
                invariant(pool.node[page] == node, f"page {page} does not know its block")
                invariant(pool.group[page] == group, f"page {page} is in another layer group")
                seen.add((store.groups[group].pool_group, page))
    return seen


def _check_node(store: CacheStore, node: int) -> None:
    tree = store.tree
    invariant(tree.attached[node], "a detached block is in the tree")
    invariant(tree.is_needed(node), "a block that nobody needs is in the tree")
    children = tree.children.nodes(node)
    tokens = [tree.tokens(child) for child in children]
    invariant(tokens == sorted(set(tokens)), "children are not sorted")
    invariant(tree.children.counts[node] == len(children), "children are miscounted")
    invariant(all(tree.parent[child] == node for child in children), "a child has another parent")
    if tree.parent[node] == NO_NODE:
        return
    key, found = tree.child(int(tree.parent[node]), tree.tokens(node))
    invariant(key == tree.key(node), "a block's key is not that of its tokens")
    invariant(found == node, "a block is not found by its key")
    length = int(tree.length[node])
    invariant(0 < length <= store.tokens_per_block, f"a block of {length} tokens")
    is_full = length == store.tokens_per_block
    invariant(is_full or not children, "a partial block has children")
    vital = [group for group, is_vital in enumerate(store.vital) if is_vital]
    invariant((tree.pages[vital, node] != NO_PAGE).all(), "a full REQUIRED page is missing")
