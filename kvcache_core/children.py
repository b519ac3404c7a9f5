"""The children of each block: one in nearly all cases, found by their tokens where there are more.

A single child costs one array entry. Only blocks with several children have an object: their
children sorted by tokens, because the longest common prefix with a query is always next to the
query's place in sorted order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from kvcache_core.errors import invariant
from kvcache_core.hashing import TOKEN_BYTES
from kvcache_core.slots import Rows

NEIGHBOURS = 8
"""Children looked at on either side of a query, at most."""
NONE = -1
SEVERAL = -2


class Branch:
    """Children of one block, sorted by tokens."""

    __slots__ = ("nodes", "tokens")

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.nodes: list[int] = []

    def find(self, tokens: bytes) -> int:
        """The child with exactly these tokens, or NONE."""
        place = bisect_left(self.tokens, tokens)
        is_there = place < len(self.tokens) and self.tokens[place] == tokens
        return self.nodes[place] if is_there else NONE

    def add(self, tokens: bytes, node: int) -> None:
        """Insert in order."""
        place = bisect_left(self.tokens, tokens)
        self.tokens.insert(place, tokens)
        self.nodes.insert(place, node)

    def beginnings(self, tokens: bytes) -> list[int]:
        """Children close by that ``tokens`` begins with and goes on after."""
        place = bisect_left(self.tokens, tokens)
        near = range(place - 1, max(-1, place - 1 - NEIGHBOURS), -1)
        return [self.nodes[index] for index in near if tokens.startswith(self.tokens[index])]

    def remove(self, tokens: bytes, node: int) -> None:
        """Take a child out."""
        place = bisect_left(self.tokens, tokens)
        invariant(self.nodes[place] == node, f"block {node} is not among its parent's children")
        del self.tokens[place]
        del self.nodes[place]


class ChildIndex:
    """Children of all blocks. ``counts`` has their number, ``only`` an only child, or NONE or
    SEVERAL.
    """

    def __init__(self, capacity: int) -> None:
        self.counts = np.zeros(capacity, dtype=np.int32)
        self.only = np.full(capacity, NONE, dtype=np.int32)
        self._branches: dict[int, Branch] = {}

    def grow(self, capacity: int) -> None:
        """Room for more blocks."""
        more = capacity - len(self.counts)
        self.counts = np.concatenate((self.counts, np.zeros(more, dtype=np.int32)))
        self.only = np.concatenate((self.only, np.full(more, NONE, dtype=np.int32)))

    def link_chain(self, nodes: Rows) -> None:
        """Each of ``nodes`` but the first becomes the only child of the one before."""
        above = nodes[:-1]
        self.counts[above] = 1
        self.only[above] = nodes[1:]

    def link(self, parent: int, node: int, tokens: bytes, sibling_tokens: bytes) -> None:
        """``node`` becomes a child of ``parent``. ``sibling_tokens``: those of an only child that
        was there before.
        """
        count = int(self.counts[parent])
        self.counts[parent] = count + 1
        if count == 0:
            self.only[parent] = node
            return
        if count == 1:
            branch = self._branches[parent] = Branch()
            branch.add(sibling_tokens, int(self.only[parent]))
            self.only[parent] = SEVERAL
        self._branches[parent].add(tokens, node)

    def unlink(self, parent: int, node: int, tokens: bytes) -> None:
        """``node`` is no child of ``parent`` any more."""
        count = int(self.counts[parent]) - 1
        self.counts[parent] = count
        if count == 0:
            invariant(self.only[parent] == node, f"block {node} is not its parent's child")
            self.only[parent] = NONE
            return
        branch = self._branches[parent]
        branch.remove(tokens, node)
        if count == 1:
            self.only[parent] = branch.nodes[0]
            del self._branches[parent]

    def unlink_chain(self, nodes: Rows) -> None:
        """All children of ``nodes`` are gone."""
        several = self.only[nodes] == SEVERAL
        if np.count_nonzero(several):
            for parent in nodes[several].tolist():
                del self._branches[parent]
        self.counts[nodes] = 0
        self.only[nodes] = NONE

    def nodes(self, parent: int) -> list[int]:
        """All children."""
        only = int(self.only[parent])
        if only == SEVERAL:
            return list(self._branches[parent].nodes)
        return [] if only == NONE else [only]

    def find(self, parent: int, tokens: bytes) -> int:
        """The child with exactly these tokens of a block with several, or NONE."""
        return self._branches[parent].find(tokens)

    def branch(self, parent: int) -> Branch | None:
        """The sorted children of a block with several."""
        return self._branches.get(parent)


def nearest(branch: Branch, query: bytes) -> Iterator[tuple[int, int]]:
    """Children that share leading tokens with ``query``, longest common prefix first.

    Yields (node, tokens in common), at most 2 * NEIGHBOURS of them.
    """
    right = bisect_left(branch.tokens, query)
    left = right - 1
    first, end = max(0, right - NEIGHBOURS), min(len(branch.tokens), right + NEIGHBOURS)

    def common(place: int) -> int:
        return common_tokens(branch.tokens[place], query) if first <= place < end else 0

    left_common, right_common = common(left), common(right)
    while left_common or right_common:
        if right_common >= left_common:
            yield branch.nodes[right], right_common
            right += 1
            right_common = common(right)
        else:
            yield branch.nodes[left], left_common
            left -= 1
            left_common = common(left)


def common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two packed token strings share."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
