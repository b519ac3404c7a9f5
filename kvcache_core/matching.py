"""Longest reusable prefix: what of a request's tokens the tree can serve.

A length is reusable when every REQUIRED group is complete at it: a full group holds all its blocks,
a windowed one its sinks and the last window, a recurrent one a snapshot at exactly that length.
Lengths are tried from the longest; OPTIONAL groups never shorten a match, they report completeness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvcache_core.groups import LayerGroup
from kvcache_core.hashing import TOKEN_BYTES, Prompt
from kvcache_core.pages import NO_PAGE
from kvcache_core.slots import Slots
from kvcache_core.spec import ReusePolicy
from kvcache_core.tree import PrefixTree

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Match:
    """``nodes`` cover the first ``tokens`` tokens, the last one perhaps partly.

    ``complete`` tells for each layer group whether its pages can be reused at this length; always
    False for PRIVATE groups. ``content_tokens`` is how far the tree knows the tokens at all:
    beyond it the request differs from all before, below it pages or snapshots were missing.
    """

    nodes: Slots
    tokens: int
    complete: tuple[bool, ...]
    content_tokens: int


class _Coverage:
    """Which blocks of a path have pages in one group; completeness at any length is then O(1)."""

    def __init__(
        self, group: LayerGroup, tokens_per_block: int, tree: PrefixTree, path: Slots
    ) -> None:
        self.group = group
        self._size = tokens_per_block
        self._tree = tree
        self._path = path
        self._present: Flags = tree.pages[group.id, path] != NO_PAGE
        self._runs = np.empty(0, dtype=np.int64)
        """Blocks with pages in a row that end at each block of the path."""
        self._leading = 0
        if not self._is_trivial:
            places = np.arange(len(path))
            missing = np.maximum.accumulate(np.where(self._present, -1, places))
            self._runs = places - missing
            gaps = np.flatnonzero(~self._present)
            self._leading = int(gaps[0]) if len(gaps) else len(path)

    @property
    def _is_trivial(self) -> bool:
        """A node never lacks the page of a full REQUIRED group."""
        cycle = self.group.life_cycle
        return cycle.is_state or (cycle.is_full and cycle.policy is ReusePolicy.REQUIRED)

    @property
    def endpoints(self) -> Flags:
        """Blocks of the path at whose end a prefix may be reused as far as states go."""
        if self.group.life_cycle.is_state:
            return self._present
        return np.ones(len(self._path), dtype=np.bool_)

    def whole(self, blocks: int) -> bool:
        """Whether the first ``blocks`` blocks are complete."""
        cycle = self.group.life_cycle
        if cycle.policy is ReusePolicy.PRIVATE:
            return False
        if cycle.is_state:
            return bool(self._present[blocks - 1])
        return self._is_trivial or self._covers(blocks, blocks * self._size)

    def partial(self, node: int, tokens: int) -> bool:
        """Whether the whole path and then a part of ``node`` serve ``tokens`` tokens."""
        cycle = self.group.life_cycle
        if cycle.policy is ReusePolicy.PRIVATE:
            return False
        has_page = bool(self._tree.pages[self.group.id, node] != NO_PAGE)
        blocks = len(self._path)
        if cycle.is_state:
            return has_page and blocks * self._size + self._tree.length[node] == tokens
        if self._is_trivial:
            return True
        return has_page and self._covers(blocks, tokens)

    def _covers(self, blocks: int, tokens: int) -> bool:
        """Whether ``blocks`` blocks hold the sinks and the window that ``tokens`` needs."""
        start, end = self.group.life_cycle.stale_range(tokens, self._size)
        if self._leading < min(start, blocks):
            return False
        return blocks <= end or bool(self._runs[blocks - 1] >= blocks - end)


def find(
    groups: Sequence[LayerGroup], tree: PrefixTree, root: int, prompt: Prompt, max_match: int
) -> Match:
    """The longest reusable prefix of ``prompt``, at most ``max_match`` tokens, below ``root``.
    Changes nothing.

    Where a layer's KV depends on tokens ahead, that many tokens less are reused than are known.
    """
    limit = min(max_match, len(prompt))
    match = _find(groups, tree, root, prompt, limit)
    ahead = max(group.life_cycle.look_ahead_tokens for group in groups)
    if not ahead:
        return match
    safe = max(0, match.content_tokens - ahead)
    if match.tokens <= safe:
        return match
    shorter = _find(groups, tree, root, prompt, safe)
    return replace(shorter, content_tokens=match.content_tokens)


def _find(
    groups: Sequence[LayerGroup], tree: PrefixTree, root: int, prompt: Prompt, limit: int
) -> Match:
    size = prompt.tokens_per_block
    path = tree.walk(prompt, limit // size)
    coverages = [_Coverage(group, size, tree, path) for group in groups]
    required = [
        coverage
        for coverage in coverages
        if coverage.group.life_cycle.policy is ReusePolicy.REQUIRED
    ]
    whole = len(path)
    content = whole * size
    query = prompt.packed[whole * size * TOKEN_BYTES : min(limit, content + size) * TOKEN_BYTES]
    if query:
        parent = int(path[-1]) if whole else root
        for node, common in tree.partial_matches(parent, query):
            content = max(content, whole * size + common)
            tokens = whole * size + common
            if all(coverage.partial(node, tokens) for coverage in required):
                complete = tuple(coverage.partial(node, tokens) for coverage in coverages)
                nodes = np.append(path, np.int32(node))
                return Match(nodes, tokens, complete, content)
    endpoints = np.ones(whole, dtype=np.bool_)
    for coverage in required:
        endpoints &= coverage.endpoints
    for blocks in (np.flatnonzero(endpoints)[::-1] + 1).tolist():
        if all(coverage.whole(blocks) for coverage in required):
            complete = tuple(coverage.whole(blocks) for coverage in coverages)
            return Match(path[:blocks], blocks * size, complete, content)
    none = tuple(group.life_cycle.policy is not ReusePolicy.PRIVATE for group in groups)
    return Match(path[:0], 0, none, content)
