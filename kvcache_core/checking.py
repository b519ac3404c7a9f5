"""Recomputes every invariant of a store from its parts. Slow on purpose; nothing here is cached."""

from __future__ import annotations

from collections import Counter

from kvcache_core.errors import invariant
from kvcache_core.pages import PagePool
from kvcache_core.store import CacheStore
from kvcache_core.tree import Node


def check_store(store: CacheStore) -> None:
    """Raise InvariantViolation on the first contradiction."""
    holders: Counter[tuple[int, int]] = Counter()
    leases: Counter[tuple[int, int]] = Counter()
    for users, counts in ((store.sequences, holders), (store.leases, leases)):
        for user in users.values():
            user.check()
            for page in user.used_pages():
                pool_group = store.groups[page.layer_group].pool_group
                invariant(
                    store.pools[pool_group].pages[page.slot] is page,
                    f"slot {page.slot} of pool group {pool_group} belongs to another page",
                )
                counts[pool_group, page.slot] += 1
    in_tree = _check_tree(store)
    for pool_group, pool in enumerate(store.pools):
        _check_slots(pool)
        for slot, occupant in enumerate(pool.pages):
            if occupant is None:
                continue
            page = occupant
            key = (pool_group, slot)
            story = f"slot {slot} of pool group {pool_group}"
            invariant(page.slot == slot, f"{story} holds the page of slot {page.slot}")
            invariant(page.holders == holders[key], f"{story}: holders {page.holders}")
            invariant(page.leases == leases[key], f"{story}: leases {page.leases}")
            invariant(page.quarantines <= page.leases, f"{story}: quarantines {page.quarantines}")
            invariant((page.node is not None) == (key in in_tree), f"{story}: tree disagrees")
            is_idle = page.node is not None and not page.holders and not page.leases
            invariant(page.cached == is_idle, f"{story}: cached {page.cached}, idle {is_idle}")
            invariant(page.holders or page.leases or page.node, f"{story} is leaked")


def _check_slots(pool: PagePool) -> None:
    occupied = [page for page in pool.pages if page is not None]
    free = [slot for start, end in pool.slots.runs() for slot in range(start, end)]
    expected = [slot for slot, page in enumerate(pool.pages) if page is None]
    invariant(free == expected, f"free runs {pool.slots.runs()}, unoccupied slots {expected}")
    invariant(pool.slots.free == len(free), f"free count {pool.slots.free}, got {len(free)}")
    queued = pool.queued()
    invariant(
        {page.slot for page in queued} == {page.slot for page in occupied if page.cached},
        "the eviction queue differs from the cached pages",
    )
    invariant(pool.cached == len(queued), f"cached count {pool.cached}, queued {len(queued)}")
    leased = sum(page.leases > 0 for page in occupied)
    invariant(pool.leased == leased, f"leased count {pool.leased}, got {leased}")
    quarantined = sum(page.quarantines > 0 for page in occupied)
    invariant(
        pool.quarantined == quarantined,
        f"quarantined count {pool.quarantined}, got {quarantined}",
    )


def _check_tree(store: CacheStore) -> set[tuple[int, int]]:
    """Returns (pool group, slot) of every page the tree knows."""
    tips: Counter[int] = Counter()
    for sequence in store.sequences.values():
        tip = sequence.tip()
        if tip is not None:
            tips[id(tip)] += 1
    seen: set[tuple[int, int]] = set()
    nodes = store.tree.nodes()
    reachable = [node for root in store.tree.roots() for node in store.tree.subtree(root)]
    invariant(
        len(reachable) == len(nodes) + len(store.tree.roots()),
        f"{len(reachable)} nodes below the roots, {len(nodes)} by key",
    )
    for node in reachable:
        _check_node(store, node)
        invariant(node.tips == tips[id(node)], f"tips {node.tips}, got {tips[id(node)]}")
        for group, page in enumerate(node.pages):
            if page is not None:
                invariant(page.node is node, f"slot {page.slot} does not know its node")
                invariant(page.layer_group == group, f"slot {page.slot} is in another layer group")
                seen.add((store.groups[group].pool_group, page.slot))
    return seen


def _check_node(store: CacheStore, node: Node) -> None:
    invariant(node.attached, "a detached node is in the tree")
    invariant(node.is_needed, "a node that nobody needs is in the tree")
    invariant(node.child_tokens == sorted(set(node.child_tokens)), "children are not sorted")
    invariant(
        [child.tokens for child in node.child_nodes] == node.child_tokens,
        "a child differs from its tokens",
    )
    invariant(all(child.parent is node for child in node.child_nodes), "a child has another parent")
    if node.parent is not None:
        invariant(0 < node.length <= store.tokens_per_block, f"a node of {node.length} tokens")
        is_full = node.length == store.tokens_per_block
        invariant(is_full or not node.child_nodes, "a partial block has children")
        missing = [group for group, vital in enumerate(store.vital) if vital]
        invariant(all(node.pages[group] for group in missing), "a full REQUIRED page is missing")
