"""Bringing a sequence's committed blocks into the prefix tree.

Publishing a block that the tree already has *rebases* the sequence: it drops its own page and uses
the tree's, so identical content is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache_core.errors import invariant
from kvcache_core.group_pages import GroupPages
from kvcache_core.hashing import TOKEN_BYTES
from kvcache_core.pages import NO_NODE, NO_PAGE, Flags
from kvcache_core.slots import Rows, Slots
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore


def publish_blocks(
    store: CacheStore,
    parent: int,
    keys: list[bytes],
    packed: bytes,
    first: int,
    groups: Sequence[GroupPages],
) -> int:
    """Publish the full blocks ``first ..`` with these keys and tokens below ``parent``; returns
    the last one's node.
    """
    known = store.tree.follow(parent, keys, packed, 0, len(keys))
    if known:
        nodes = np.array(known, dtype=np.int32)
        _share(store, nodes, first, groups)
        parent = known[-1]
    count = len(known)
    if count == len(keys):
        return parent
    size = store.tokens_per_block * TOKEN_BYTES
    above = store.tree.key(parent)
    added = store.tree.insert_chain(parent, keys[count:], packed[count * size :])
    for pages in groups:
        _give(store, pages, added, first + count)
    store.remove_covered(int(added[0]))
    store.counters.blocks_stored += len(added)
    store.events.stored(above, keys[count:])
    return int(added[-1])


def _share(store: CacheStore, nodes: Slots, first: int, groups: Sequence[GroupPages]) -> None:
    """Use the tree's pages of blocks it has, give it those it lacks."""
    for pages in groups:
        pool, group = pages.pool, pages.group
        places = np.flatnonzero(_publishable(pages, first, len(nodes)))
        own = pages.pages[first + places]
        theirs = store.tree.pages[group.id, nodes[places]]
        is_new = pool.node[own] == NO_NODE
        on_host = (theirs >= pool.num_device_slots) & is_new & (own < pool.num_device_slots)
        if on_host.any():  # the page at hand is the better one
            pool.raise_priority(own[on_host], pool.priority[theirs[on_host]])
            store.tree.pages[group.id, nodes[places[on_host]]] = NO_PAGE
            pool.forget(theirs[on_host])
            theirs[on_host] = NO_PAGE
        other = (theirs != NO_PAGE) & (theirs != own)
        if other.any():
            pool.hold(theirs[other])
            pool.raise_priority(theirs[other], pool.priority[own[other]])
            pages.pages[first + places[other]] = theirs[other]
            pool.release(own[other][::-1])
            store.counters.pages_rebased += int(np.count_nonzero(other))
        lacking = (theirs == NO_PAGE) & is_new
        if lacking.any():
            store.publish(group, own[lacking], nodes[places[lacking]])


def _give(store: CacheStore, pages: GroupPages, nodes: Rows, first: int) -> None:
    """Publish the pages of new blocks."""
    own, wanted = pages.pages[first : first + len(nodes)], _publishable(pages, first, len(nodes))
    if np.count_nonzero(wanted) < len(nodes):
        invariant(not store.vital[pages.group.id], f"blocks from {first} on lack pages to publish")
        own, nodes = own[wanted], nodes[wanted]
    store.publish(pages.group, own, nodes)


def _publishable(pages: GroupPages, first: int, count: int) -> Flags:
    """For each of the blocks ``first .. first + count`` whether its page may be published."""
    if pages.group.life_cycle.policy is ReusePolicy.PRIVATE:
        return np.zeros(count, dtype=np.bool_)
    wanted: Flags = pages.pages[first : first + count] != NO_PAGE
    wanted[: max(0, pages.publish_from - first)] = False
    return wanted


def publish_tail(
    store: CacheStore,
    parent: int,
    tokens: bytes,
    ordinal: int,
    groups: Sequence[GroupPages],
) -> None:
    """Publish the partial last block ``tokens`` of a closing sequence below ``parent``.

    ``groups`` may hold recurrent ones whose live state is exactly at the end of ``tokens``.
    """
    owned = [(pages, own_page(pages, ordinal)) for pages in groups]
    has_state = any(pages.group.life_cycle.is_state and page != NO_PAGE for pages, page in owned)
    offered = [pages.group.id for pages, page in owned if page != NO_PAGE]
    if not has_state and store.tree.covers(parent, tokens, offered):
        return
    publish_partial(store, parent, tokens, owned)


def publish_partial(
    store: CacheStore, parent: int, tokens: bytes, owned: Sequence[tuple[GroupPages, int]]
) -> bool:
    """Publish ``tokens`` as a partial block with these pages, NO_PAGE where a group has none.

    False when the block lacks a page without which it is useless.
    """
    key, node = store.tree.child(parent, tokens)
    if node is None:
        if any(page == NO_PAGE and store.vital[pages.group.id] for pages, page in owned):
            return False
        node = store.tree.insert(parent, key, tokens)
    for pages, page in owned:
        if page != NO_PAGE and store.tree.pages[pages.group.id, node] == NO_PAGE:
            store.publish(pages.group, _one(page), _one(node))
    store.remove_covered(node)
    store.prune(node)
    return True


def publish_state(store: CacheStore, node: int, groups: Sequence[GroupPages]) -> None:
    """Publish live states that are exactly at the end of the full block ``node``."""
    if store.tree.parent[node] == NO_NODE:
        return
    for pages in groups:
        page = own_page(pages, 0)
        if page != NO_PAGE and store.tree.pages[pages.group.id, node] == NO_PAGE:
            store.publish(pages.group, _one(page), _one(node))


def own_page(pages: GroupPages, ordinal: int) -> int:
    """The page of a block if it is this sequence's alone and may be published, else NO_PAGE."""
    index = 0 if pages.group.life_cycle.is_state else ordinal
    is_private_group = pages.group.life_cycle.policy is ReusePolicy.PRIVATE
    if index >= pages.size or is_private_group or index < pages.publish_from:
        return NO_PAGE
    page = int(pages.pages[index])
    if page == NO_PAGE or not pages.pool.is_private(_one(page))[0]:
        return NO_PAGE
    return page


def _one(number: int) -> Slots:
    return np.array([number], dtype=np.int32)
