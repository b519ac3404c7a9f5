"""Longest reusable prefix: what of a request's tokens the tree can serve.

A length is reusable when every REQUIRED group is complete at it: a full group holds all its blocks,
a windowed one its sinks and the last window, a recurrent one a snapshot at exactly that length.
Lengths are tried from the longest; OPTIONAL groups never shorten a match, they report completeness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvcache_core.children import SEVERAL
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
    ``safe_tokens`` of these do not depend on tokens that may differ.
    """

    nodes: Slots
    tokens: int
    complete: tuple[bool, ...]
    content_tokens: int
    safe_tokens: int


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

    def partial(self, blocks: int, node: int, tokens: int) -> bool:
        """Whether ``blocks`` blocks and then a part of ``node`` serve ``tokens`` tokens."""
        cycle = self.group.life_cycle
        if cycle.policy is ReusePolicy.PRIVATE:
            return False
        has_page = bool(self._tree.pages[self.group.id, node] != NO_PAGE)
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

    Where a layer's KV depends on tokens ahead, what comes last is reused only if they are known to
    be the same.
    """
    limit = min(max_match, len(prompt))
    ahead = max(group.life_cycle.look_ahead_tokens for group in groups)
    if not ahead:
        return _Search(groups, tree, root, prompt, limit).longest()
    known = _Search(groups, tree, root, prompt, min(limit + ahead, len(prompt))).longest()
    safe = min(limit, max(0, known.content_tokens - ahead))
    match = _Search(groups, tree, root, prompt, safe).longest()
    return replace(match, content_tokens=min(limit, known.content_tokens), safe_tokens=safe)


class _Search:
    """One look for the longest reusable prefix of at most ``limit`` tokens."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        tree: PrefixTree,
        root: int,
        prompt: Prompt,
        limit: int,
    ) -> None:
        self._groups = groups
        self._tree = tree
        self._root = root
        self._packed = prompt.packed
        self._limit = limit
        self._size = prompt.tokens_per_block
        self._path = tree.walk(prompt, limit // self._size)
        self._content = len(self._path) * self._size

    @cached_property
    def _coverages(self) -> list[_Coverage]:
        return [_Coverage(group, self._size, self._tree, self._path) for group in self._groups]

    @cached_property
    def _required(self) -> list[_Coverage]:
        return [
            coverage
            for coverage in self._coverages
            if coverage.group.life_cycle.policy is ReusePolicy.REQUIRED
        ]

    def longest(self) -> Match:
        """Lengths from the longest: inside the block behind the path, then down the path."""
        whole = len(self._path)
        found = self._partial(whole)
        if found is not None:
            return found
        if not whole:
            return self._nothing()
        endpoints = np.ones(whole, dtype=np.bool_)
        for coverage in self._required:
            endpoints &= coverage.endpoints
        branches = self._branches()
        for blocks in (np.flatnonzero(endpoints | branches)[::-1] + 1).tolist():
            if endpoints[blocks - 1] and all(c.whole(blocks) for c in self._required):
                complete = tuple(coverage.whole(blocks) for coverage in self._coverages)
                return self._match(self._path[:blocks], blocks * self._size, complete)
            found = self._partial(blocks - 1) if branches[blocks - 1] else None
            if found is not None:
                return found
        return self._nothing()

    def _nothing(self) -> Match:
        """A match of no token, which every shared group serves."""
        policies = (group.life_cycle.policy for group in self._groups)
        none = tuple(policy is not ReusePolicy.PRIVATE for policy in policies)
        return self._match(self._path[:0], 0, none)

    def _branches(self) -> Flags:
        """Blocks of the path beside which another may serve what the block itself cannot: one with
        a snapshot of states, or with a windowed page that the block has lost.

        For full attention the block itself is always as good.
        """
        if not len(self._path) or all(c.group.life_cycle.is_full for c in self._required):
            return np.zeros(len(self._path), dtype=np.bool_)
        above = np.concatenate(([self._root], self._path[:-1]))
        several: Flags = self._tree.children.only[above] == SEVERAL
        return several

    def _partial(self, blocks: int) -> Match | None:
        """The longest match that ends inside a block behind the first ``blocks``: of equally long
        ones that for which most groups are complete.
        """
        start = blocks * self._size
        end = min(start + self._size, self._limit)
        query = self._packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        best: Match | None = None
        if not query:
            return None
        parent = int(self._path[blocks - 1]) if blocks else self._root
        for node, common in self._tree.partial_matches(parent, query):
            tokens = start + common
            self._content = max(self._content, tokens)
            if best is not None and tokens < best.tokens:
                break
            if not all(coverage.partial(blocks, node, tokens) for coverage in self._required):
                continue
            complete = tuple(c.partial(blocks, node, tokens) for c in self._coverages)
            if best is None or sum(complete) > sum(best.complete):
                nodes = np.append(self._path[:blocks], np.int32(node))
                best = self._match(nodes, tokens, complete)
        return best

    def _match(self, nodes: Slots, tokens: int, complete: tuple[bool, ...]) -> Match:
        return Match(nodes, tokens, complete, self._content, self._content)
