"""Bringing a sequence's committed blocks into the prefix tree.

Publishing a block that the tree already has *rebases* the sequence: it drops its own page and uses
the tree's, so identical content is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_core.errors import invariant
from kvcache_core.group_pages import GroupPages
from kvcache_core.pages import Page
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore
from kvcache_core.tree import Node


def publish_block(
    store: CacheStore, parent: Node, tokens: bytes, ordinal: int, groups: Sequence[GroupPages]
) -> tuple[Node, bool]:
    """Publish one full block below ``parent``; returns its node and whether it is new."""
    key, node = store.tree.child(parent, tokens)
    is_new = node is None
    if node is None:
        node = store.tree.insert(parent, key, tokens)
    for pages in groups:
        group = pages.group
        if group.life_cycle.is_state or not _may_publish(pages, ordinal):
            continue
        own, theirs = pages.pages[ordinal], node.pages[group.id]
        if theirs is None:
            if own is not None and own.node is None:
                store.publish(own, node)
        elif own is not None and own is not theirs:
            store.hold(theirs)
            pages.put(ordinal, theirs)
            store.release(own)
            store.counters.pages_rebased += 1
    if is_new:
        missing = [
            group.id for group in store.groups if store.vital[group.id] and not node.pages[group.id]
        ]
        invariant(not missing, f"block {ordinal} was committed twice with other tokens: {missing}")
        store.remove_covered(node)
    return node, is_new


def publish_tail(
    store: CacheStore,
    parent: Node,
    tokens: bytes,
    ordinal: int,
    groups: Sequence[GroupPages],
) -> None:
    """Publish the partial last block ``tokens`` of a closing sequence below ``parent``.

    ``groups`` may hold recurrent ones whose live state is exactly at the end of ``tokens``.
    """
    owned = [(pages, _private_page(pages, ordinal)) for pages in groups]
    has_state = any(pages.group.life_cycle.is_state and page for pages, page in owned)
    if store.tree.covers(parent, tokens) and not has_state:
        return
    key, node = store.tree.child(parent, tokens)
    if node is None:
        if any(page is None and store.vital[pages.group.id] for pages, page in owned):
            return
        node = store.tree.insert(parent, key, tokens)
    for pages, page in owned:
        if page is not None and node.pages[pages.group.id] is None:
            store.publish(page, node)
    store.remove_covered(node)
    store.prune(node)


def publish_state(store: CacheStore, node: Node, groups: Sequence[GroupPages]) -> None:
    """Publish live states that are exactly at the end of the full block ``node``."""
    for pages in groups:
        page = _private_page(pages, 0)
        is_recurrent = pages.group.life_cycle.is_state and node.parent is not None
        if is_recurrent and page is not None and node.pages[pages.group.id] is None:
            store.publish(page, node)


def _private_page(pages: GroupPages, ordinal: int) -> Page | None:
    """The page of a block if it is this sequence's alone and may be published."""
    index = 0 if pages.group.life_cycle.is_state else ordinal
    if index >= len(pages.pages) or not _may_publish(pages, index):
        return None
    page = pages.pages[index]
    return page if page is not None and page.node is None and page.holders == 1 else None


def _may_publish(pages: GroupPages, ordinal: int) -> bool:
    if pages.group.life_cycle.policy is ReusePolicy.PRIVATE:
        return False
    return ordinal >= pages.publish_from
