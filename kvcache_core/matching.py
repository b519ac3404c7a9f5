"""Longest reusable prefix: what of a request's tokens the tree can serve.

A length is reusable when every REQUIRED group is complete at it: a full group holds all its blocks,
a windowed one its sinks and the last window, a recurrent one a snapshot at exactly that length.
Lengths are tried from the longest; OPTIONAL groups never shorten a match, they report completeness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.groups import LayerGroup
from kvcache_core.hashing import TOKEN_BYTES
from kvcache_core.spec import ReusePolicy
from kvcache_core.tree import Node, PrefixTree


@dataclass(frozen=True)
class Match:
    """``blocks`` cover the first ``tokens`` tokens, the last one perhaps partly.

    ``complete`` tells for each layer group whether its pages can be reused at this length; always
    False for PRIVATE groups.
    """

    blocks: tuple[Node, ...]
    tokens: int
    complete: tuple[bool, ...]


class _Coverage:
    """Which blocks of a path have pages in one group; completeness at any length is then O(1)."""

    def __init__(self, group: LayerGroup, tokens_per_block: int, path: Sequence[Node]) -> None:
        self.group = group
        self._tokens_per_block = tokens_per_block
        self._path = path
        self._runs: list[int] = []
        """Blocks with pages in a row that end at each block of the path."""
        self._leading = 0
        if not self._is_trivial:
            run = 0
            for node in path:
                run = run + 1 if node.pages[group.id] is not None else 0
                self._runs.append(run)
            while self._leading < len(path) and self._runs[self._leading] == self._leading + 1:
                self._leading += 1

    @property
    def _is_trivial(self) -> bool:
        """A node never lacks the page of a full REQUIRED group."""
        cycle = self.group.life_cycle
        return cycle.is_state or (cycle.is_full and cycle.policy is ReusePolicy.REQUIRED)

    def complete(self, blocks: int, partial: Node | None, tokens: int) -> bool:
        """Whether the first ``blocks`` nodes of the path, then ``partial``, serve ``tokens``."""
        cycle = self.group.life_cycle
        if cycle.policy is ReusePolicy.PRIVATE:
            return False
        if not tokens:
            return True
        last = partial or self._path[blocks - 1]
        if cycle.is_state:
            exact = partial is None or blocks * self._tokens_per_block + partial.length == tokens
            return exact and last.pages[self.group.id] is not None
        if self._is_trivial:
            return True
        start, end = cycle.stale_range(tokens, self._tokens_per_block)
        if partial is not None and partial.pages[self.group.id] is None:
            return False
        if self._leading < min(start, blocks):
            return False
        return blocks <= end or self._runs[blocks - 1] >= blocks - end


def find(
    groups: Sequence[LayerGroup],
    tokens_per_block: int,
    tree: PrefixTree,
    root: Node,
    packed: bytes,
) -> Match:
    """The longest reusable prefix of ``packed`` tokens below ``root``. Changes nothing."""
    block_bytes = tokens_per_block * TOKEN_BYTES
    path: list[Node] = []
    parent = root
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        _, node = tree.child(parent, packed[start : start + block_bytes])
        if node is None:
            break
        path.append(node)
        parent = node
    coverages = [_Coverage(group, tokens_per_block, path) for group in groups]
    required = [
        coverage
        for coverage in coverages
        if coverage.group.life_cycle.policy is ReusePolicy.REQUIRED
    ]

    def match(blocks: int, partial: Node | None, tokens: int) -> Match:
        nodes = tuple(path[:blocks]) if partial is None else (*path[:blocks], partial)
        complete = (coverage.complete(blocks, partial, tokens) for coverage in coverages)
        return Match(nodes, tokens, tuple(complete))

    whole = len(path)
    query = packed[whole * block_bytes : (whole + 1) * block_bytes]
    if query:
        for partial, common in tree.partial_matches(parent, query):
            tokens = whole * tokens_per_block + common
            if all(coverage.complete(whole, partial, tokens) for coverage in required):
                return match(whole, partial, tokens)
    for blocks in range(whole, 0, -1):
        tokens = blocks * tokens_per_block
        if all(coverage.complete(blocks, None, tokens) for coverage in required):
            return match(blocks, None, tokens)
    return match(0, None, 0)
