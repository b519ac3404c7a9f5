"""The prefix tree: which blocks of tokens have pages, by sha256 chain.

A node is one block below its parent block: full (tokens_per_block tokens) or partial (fewer, never
with children). Exact blocks are found through one dictionary of keys; the best partly equal child
through each node's sorted list of child tokens, because the longest common prefix with a query is
always next to the query's place in sorted order. The tree knows pages but never frees one itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kvcache_core.errors import invariant
from kvcache_core.hashing import TOKEN_BYTES, child_key, root_key
from kvcache_core.pages import Page

NEIGHBOURS = 8
"""Children looked at on either side of a query, at most."""


class Node:
    """One block. ``pages`` has one entry per layer group; ``tips`` counts sequences ending here."""

    __slots__ = (
        "attached",
        "child_nodes",
        "child_tokens",
        "key",
        "length",
        "pages",
        "parent",
        "tips",
        "tokens",
    )

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.length = len(tokens) // TOKEN_BYTES
        self.pages: list[Page | None] = [None] * groups
        self.child_tokens: list[bytes] = []
        self.child_nodes: list[Node] = []
        self.tips = 0
        self.attached = True

    @property
    def is_needed(self) -> bool:
        """True while the node has pages, children or a sequence that ends here."""
        return bool(self.child_nodes) or self.tips > 0 or any(self.pages)


class PrefixTree:
    """All nodes of all scopes."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, scope: bytes) -> Node:
        """The root of a scope, made when missing."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Node(root_key(scope), None, scope, self._num_groups)
        return root

    def existing_root(self, scope: bytes) -> Node | None:
        """The root of a scope that has blocks."""
        return self._roots.get(scope)

    def child(self, parent: Node, tokens: bytes) -> tuple[bytes, Node | None]:
        """Key of the block ``tokens`` below ``parent``, and its node if there is one."""
        key = child_key(parent.key, tokens)
        return key, self._nodes.get(key)

    def insert(self, parent: Node, key: bytes, tokens: bytes) -> Node:
        """A new node without pages."""
        node = Node(key, parent, tokens, self._num_groups)
        place = bisect_left(parent.child_tokens, tokens)
        parent.child_tokens.insert(place, tokens)
        parent.child_nodes.insert(place, node)
        self._nodes[key] = node
        return node

    def partial_matches(self, parent: Node, query: bytes) -> Iterator[tuple[Node, int]]:
        """Children that share leading tokens with ``query``, longest common prefix first.

        Yields (node, tokens in common), at most 2 * NEIGHBOURS of them.
        """
        right = bisect_left(parent.child_tokens, query)
        left = right - 1
        first, end = max(0, right - NEIGHBOURS), min(len(parent.child_tokens), right + NEIGHBOURS)
        left_common = _common_tokens(parent.child_tokens[left], query) if left >= first else 0
        right_common = _common_tokens(parent.child_tokens[right], query) if right < end else 0
        while left_common or right_common:
            if right_common >= left_common:
                yield parent.child_nodes[right], right_common
                right += 1
                right_common = (
                    _common_tokens(parent.child_tokens[right], query) if right < end else 0
                )
            else:
                yield parent.child_nodes[left], left_common
                left -= 1
                left_common = (
                    _common_tokens(parent.child_tokens[left], query) if left >= first else 0
                )

    def covers(self, parent: Node, tokens: bytes) -> bool:
        """True when a child begins with ``tokens``, so that a partial block of them is useless."""
        place = bisect_left(parent.child_tokens, tokens)
        return place < len(parent.child_tokens) and parent.child_tokens[place].startswith(tokens)

    def covered_by(self, node: Node) -> list[Node]:
        """Partial siblings close to ``node`` that ``node`` begins with: it makes them useless."""
        parent = node.parent
        invariant(parent is not None, "a root has no siblings")
        assert parent is not None
        place = bisect_left(parent.child_tokens, node.tokens)
        near = range(place - 1, max(-1, place - 1 - NEIGHBOURS), -1)
        return [
            parent.child_nodes[index]
            for index in near
            if node.tokens.startswith(parent.child_tokens[index])
        ]

    def subtree(self, node: Node) -> list[Node]:
        """``node`` and everything below it, parents first."""
        nodes = [node]
        for member in nodes:
            nodes.extend(member.child_nodes)
        return nodes

    def detach(self, node: Node) -> None:
        """Take a node out; its pages must have been forgotten. Descendants are detached before."""
        invariant(node.attached, "a node can be detached only once")
        node.attached = False
        parent = node.parent
        if parent is None:
            del self._roots[node.tokens]
            return
        del self._nodes[node.key]
        place = bisect_left(parent.child_tokens, node.tokens)
        invariant(parent.child_nodes[place] is node, "a child is not in its parent's list")
        del parent.child_tokens[place]
        del parent.child_nodes[place]

    def prune(self, node: Node | None) -> list[Node]:
        """Detach ``node`` and its ancestors as far as nobody needs them; returns the detached."""
        detached = []
        while node is not None and node.attached and not node.is_needed:
            self.detach(node)
            detached.append(node)
            node = node.parent
        return detached

    def nodes(self) -> list[Node]:
        """All blocks, in insertion order."""
        return list(self._nodes.values())

    def roots(self) -> list[Node]:
        """All roots, in insertion order."""
        return list(self._roots.values())


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two packed token strings share."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
