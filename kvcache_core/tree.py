"""The prefix tree: which blocks of tokens have pages, by sha256 chain.

A node is one block below its parent block: full (tokens_per_block tokens) or partial (fewer, never
with children). Nodes are numbers into arrays, so that a million of them are a handful of objects
and whole chains are inserted and removed at once. Blocks are found from their parents on: by key
where there is one child, by tokens among several (:mod:`kvcache_core.children`). A dictionary of
all keys would cost more than all else at a million blocks: its entries lie far apart, and now and
then it is built anew. The tree knows pages but never frees one itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.children import SEVERAL, ChildIndex, common_tokens, nearest
from kvcache_core.errors import invariant
from kvcache_core.hashing import TOKEN_BYTES, Prompt, child_key, root_key
from kvcache_core.pages import NO_NODE, NO_PAGE, divided
from kvcache_core.slots import Rows, Slots, rows_of, runs_of

FIRST_CAPACITY = 1024
Flags = npt.NDArray[np.bool_]
WALK_BLOCKS = 64
"""Keys looked up together."""
ROW = 8
"""Blocks numbered in a row of which comparing them at once costs less than one by one."""
LONG_RUN = 16
"""Blocks in a row for which one copy of them all costs less than one of each."""


class PrefixTree:
    """All blocks of all scopes. ``pages`` is int32 ``[groups, nodes]``, NO_PAGE where missing.

    ``tips`` counts the sequences that end at a node. A detached node keeps its number until the
    last of them has left.
    """

    def __init__(self, num_groups: int, tokens_per_block: int, capacity: int) -> None:
        self._size = tokens_per_block * TOKEN_BYTES
        self._tokens_per_block = tokens_per_block
        capacity = max(capacity, FIRST_CAPACITY)
        self.pages = np.full((num_groups, capacity), NO_PAGE, dtype=np.int32)
        self.parent = np.full(capacity, NO_NODE, dtype=np.int32)
        self.length = np.zeros(capacity, dtype=np.int32)
        self.tips = np.zeros(capacity, dtype=np.int32)
        self.attached = np.zeros(capacity, dtype=np.bool_)
        self._marks = np.zeros(capacity + 1, dtype=np.bool_)
        """False but while a method works; the last one, which is NO_NODE's, always."""
        self.children = ChildIndex(capacity)
        self._keys = np.empty(capacity, dtype=np.object_)
        """Objects, since events tell them; Python's collector does not look into arrays."""
        self._tokens = np.zeros((capacity, self._size), dtype=np.uint8)
        self._roots: dict[bytes, int] = {}
        self._scopes: dict[int, bytes] = {}
        self._free = array("i")
        self._end = 0

    def root(self, scope: bytes) -> int:
        """The root of a scope, made when missing."""
        root = self._roots.get(scope)
        if root is None:
            root = int(self._number(1)[0])
            self._keys[root] = root_key(scope)
            self.parent[root] = NO_NODE
            self.length[root] = 0
            self._roots[scope] = root
            self._scopes[root] = scope
        return root

    def existing_root(self, scope: bytes) -> int | None:
        """The root of a scope that has blocks."""
        return self._roots.get(scope)

    def key(self, node: int) -> bytes:
        """The key of a block or root."""
        key: bytes = self._keys[node]
        return key

    def tokens(self, node: int) -> bytes:
        """The packed tokens of a block."""
        packed: bytes = self._tokens[node, : int(self.length[node]) * TOKEN_BYTES].tobytes()
        return packed

    def is_needed(self, node: int) -> bool:
        """True while a block has pages, children or a sequence that ends there."""
        return bool(
            self.children.counts[node] or self.tips[node] or (self.pages[:, node] != NO_PAGE).any()
        )

    def are_bare(self, nodes: Slots) -> Flags:
        """For each of ``nodes`` whether nobody needs it: :meth:`is_needed` for many."""
        rows = rows_of(nodes)
        used = self.children.counts[rows] + self.tips[rows]
        bare: Flags = (used == 0) & (self.pages[:, rows] == NO_PAGE).all(0)
        return bare

    def walk(self, prompt: Prompt, blocks: int) -> Slots:
        """The blocks in the tree that begin ``prompt``, at most ``blocks`` of them."""
        path: list[int] = []
        above = self._roots.get(prompt.scope)
        while above is not None and len(path) < blocks:
            first, end = len(path), min(blocks, max(len(path) + WALK_BLOCKS, len(prompt.known)))
            if len(prompt.known) < end and not path:
                end = 1  # most prompts share nothing: hash no more than shows that
            path += self.follow(above, prompt.keys(end), prompt.packed, first, end)
            above = path[-1] if len(path) == end else None
        return np.array(path, dtype=np.int32)

    def follow(
        self, above: int, keys: list[bytes], packed: bytes, first: int, end: int
    ) -> list[int]:
        """The blocks below ``above`` with keys ``first .. end`` of ``keys``, each below the one
        before, as far as they are there. ``packed`` are the tokens of all ``keys``.
        """
        path: list[int] = []
        while first < end:
            node = self._below(above, keys[first], packed, first)
            if node is None:
                break
            path.append(node)
            first += 1
            if not first % ROW:  # not at each: most steps of a chain in pieces would be in vain
                row = self._in_a_row(node, keys, first, end)
                path += row
                first += len(row)
            above = path[-1]
        return path

    def _below(self, above: int, key: bytes, packed: bytes, place: int) -> int | None:
        """The child with this key; its tokens are block ``place`` of ``packed``."""
        node = self.children.only.item(above)
        if node == SEVERAL:
            tokens = packed[place * self._size : (place + 1) * self._size]
            node = self.children.find(above, tokens)
        return node if node != NO_NODE and self._keys[node] == key else None

    def _in_a_row(self, node: int, keys: list[bytes], first: int, end: int) -> range:
        """Blocks with keys ``first .. end`` below ``node``, as far as the number of each is one
        more than the last one's: most of a chain.
        """
        only = self.children.only[node : node + end - first]
        if only[:ROW].tolist() != list(range(node + 1, node + 1 + ROW)):
            return range(0)
        others = only != np.arange(node + 1, node + 1 + len(only), dtype=np.int32)
        count = int(others.argmax()) if np.count_nonzero(others) else len(only)
        theirs: list[bytes] = self._keys[node + 1 : node + 1 + count].tolist()
        ours = keys[first : first + count]
        if theirs != ours:
            count = next(
                i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]
            )
        return range(node + 1, node + 1 + count)

    def insert(self, parent: int, key: bytes, tokens: bytes) -> int:
        """A new block without pages."""
        node = int(self._number(1)[0])
        self.parent[node] = parent
        self.length[node] = len(tokens) // TOKEN_BYTES
        self._tokens[node, : len(tokens)] = np.frombuffer(tokens, dtype=np.uint8)
        self._keys[node] = key
        self._link(parent, node, tokens)
        return node

    def insert_chain(self, parent: int, keys: Sequence[bytes], packed: bytes) -> Rows:
        """New full blocks without pages, each below the one before; none of them is there."""
        nodes = self._number(len(keys))
        rows = rows_of(nodes)
        self.parent[rows[0]] = parent
        self.parent[rows[1:]] = nodes[:-1]
        self.length[rows] = self._tokens_per_block
        self._fill(nodes, keys, packed)
        self.children.link_chain(rows)
        self._link(parent, int(nodes[0]), packed[: self._size])
        return rows

    def child(self, parent: int, tokens: bytes) -> tuple[bytes, int | None]:
        """Key of the block ``tokens`` below ``parent``, and its node if there is one."""
        key = child_key(self.key(parent), tokens)
        return key, self._below(parent, key, tokens, 0)

    def partial_matches(self, parent: int, query: bytes) -> Iterator[tuple[int, int]]:
        """Children that share leading tokens with ``query``, longest common prefix first.

        Yields (node, tokens in common), a bounded number of them.
        """
        branch = self.children.branch(parent)
        if branch is not None:
            yield from nearest(branch, query)
            return
        for node in self.children.nodes(parent):
            common = common_tokens(self.tokens(node), query)
            if common:
                yield node, common

    def covers(self, parent: int, tokens: bytes, groups: Sequence[int]) -> bool:
        """True when a child begins with ``tokens`` and has pages of ``groups``, so that a partial
        block of them is useless.
        """
        length = len(tokens) // TOKEN_BYTES
        return any(
            common == length and bool((self.pages[groups, node] != NO_PAGE).all())
            for node, common in self.partial_matches(parent, tokens)
        )

    def covered_by(self, node: int) -> list[int]:
        """Partial siblings close to ``node`` that ``node`` begins with: it makes them useless,
        unless they have pages that it lacks.
        """
        branch = self.children.branch(int(self.parent[node]))
        if branch is None:
            return []
        lacking = self.pages[:, node] == NO_PAGE
        return [
            other
            for other in branch.beginnings(self.tokens(node))
            if not (self.pages[lacking, other] != NO_PAGE).any()
        ]

    def subtree(self, node: int) -> list[int]:
        """``node`` and everything below it, parents first."""
        nodes = [node]
        for member in nodes:
            nodes.extend(self.children.nodes(member))
        return nodes

    def chains(self, root: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """All full blocks below ``root`` as unbranched chains, parents first: the key above a
        chain, then its keys.
        """
        waiting = [root]
        while waiting:
            above = waiting.pop()
            for child in self.children.nodes(above):
                keys: list[bytes] = []
                node, below = child, [child]
                while len(below) == 1 and self.length[below[0]] == self._tokens_per_block:
                    node = below[0]
                    keys.append(self.key(node))
                    below = self.children.nodes(node)
                if keys:
                    yield self.key(above), keys
                    waiting.append(node)

    def detach(self, nodes: Rows, inside: Flags) -> list[bytes]:
        """Take blocks out with all their descendants, which ``nodes`` contains; their pages must
        have been forgotten. ``inside`` tells whose parent is one of them. Returns the keys of the
        full ones.
        """
        invariant(
            np.count_nonzero(self.attached[nodes]) == len(nodes),
            "a block can be detached only once",
        )
        self.attached[nodes] = False
        above = nodes[~inside]
        for node, parent in zip(above.tolist(), self.parent[above].tolist(), strict=True):
            if parent == NO_NODE:
                del self._roots[self._scopes.pop(node)]
            else:
                self.children.unlink(parent, node, self.tokens(node))
        self.children.unlink_chain(nodes)
        tips = self.tips[nodes]
        self._free_numbers(nodes[tips == 0] if np.count_nonzero(tips) else nodes)
        lengths = self.length[nodes]
        is_full = lengths == self._tokens_per_block
        keys: list[bytes] = self._keys[divided(nodes, is_full)[0]].tolist()
        self._keys[nodes] = None
        return keys

    def has_parent_in(self, nodes: Rows) -> Flags:
        """For each of ``nodes``, which are distinct, whether its parent is one of them."""
        self._marks[nodes] = True
        inside: Flags = self._marks[self.parent[nodes]]
        self._marks[nodes] = False
        return inside

    def _fill(self, nodes: Slots, keys: Sequence[bytes], packed: bytes) -> None:
        """Keep the keys and tokens of new full blocks."""
        tokens = np.frombuffer(packed, dtype=np.uint8).reshape(len(keys), self._size)
        runs = runs_of(nodes)
        if len(runs) * LONG_RUN > len(nodes):
            self._tokens[nodes] = tokens
            self._keys[nodes] = keys
            return
        for first, end in runs:
            start = int(nodes[first])
            self._tokens[start : start + end - first] = tokens[first:end]
            self._keys[start : start + end - first] = keys[first:end]

    def prune(self, node: int) -> list[bytes]:
        """Detach ``node`` and its ancestors as far as nobody needs them; returns the full ones'
        keys.
        """
        removed: list[bytes] = []
        while node != NO_NODE and self.attached[node] and not self.is_needed(node):
            parent = int(self.parent[node])
            removed += self.detach(np.array([node]), np.zeros(1, dtype=np.bool_))
            node = parent
        return removed

    def add_tip(self, node: int) -> None:
        """One more sequence ends here."""
        self.tips[node] += 1

    def remove_tip(self, node: int) -> None:
        """One sequence less ends here."""
        self.tips[node] -= 1
        if not self.tips[node] and not self.attached[node]:
            self._free_numbers(np.array([node]))

    def nodes(self) -> list[int]:
        """All blocks."""
        blocks: list[int] = np.flatnonzero(self.attached & (self.length > 0)).tolist()
        return blocks

    def roots(self) -> list[int]:
        """All roots, in insertion order."""
        return list(self._roots.values())

    def _link(self, parent: int, node: int, tokens: bytes) -> None:
        only = int(self.children.only[parent])
        self.children.link(parent, node, tokens, self.tokens(only) if only >= 0 else b"")

    def _number(self, count: int) -> Slots:
        """Numbers for new nodes, attached and without anything."""
        reused = min(count, len(self._free))
        if self._end + count - reused > len(self.parent):
            self._grow(max(2 * len(self.parent), self._end + count))
        start, end = len(self._free) - reused, self._end + count - reused
        numbers = np.frombuffer(self._free[start:], dtype=np.int32)
        del self._free[start:]
        if reused < count:
            fresh = np.arange(self._end, end, dtype=np.int32)
            numbers = np.concatenate((numbers, fresh)) if reused else fresh
        self._end = end
        self.attached[numbers] = True
        return numbers

    def _free_numbers(self, nodes: Rows) -> None:
        self._free.frombytes(nodes[::-1].astype(np.int32).tobytes())

    def _grow(self, capacity: int) -> None:
        def grown(old: npt.NDArray[np.generic], fill: int) -> npt.NDArray[np.generic]:
            new = np.full((capacity, *old.shape[1:]), fill, dtype=old.dtype)
            new[: len(old)] = old
            return new

        pages = np.full((len(self.pages), capacity), NO_PAGE, dtype=np.int32)
        pages[:, : self.pages.shape[1]] = self.pages
        self.pages = pages
        self.parent = grown(self.parent, NO_NODE)  # type: ignore[assignment]
        self.length = grown(self.length, 0)  # type: ignore[assignment]
        self.tips = grown(self.tips, 0)  # type: ignore[assignment]
        self.attached = grown(self.attached, 0)  # type: ignore[assignment]
        self._marks = np.zeros(capacity + 1, dtype=np.bool_)
        keys = np.empty(capacity, dtype=np.object_)
        keys[: len(self._keys)] = self._keys
        self._keys = keys
        self._tokens = grown(self._tokens, 0)  # type: ignore[assignment]
        self.children.grow(capacity)
