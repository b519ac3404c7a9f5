"""A prefix cache as one would write it first: dictionaries, one object a block, reference counts.

It does what the benchmark asks of the real manager (two layer groups under one key a block, one of
them windowed; match, allocate, publish, evict the least recently used) and nothing else: no partial
blocks, no policies, no tiers, no leases, no events, no checks. So it is what plain Python costs
when nothing else is wanted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_core.hashing import child_key, pack_tokens, root_key

TokenArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class Block:
    """One page of one group. ``key`` is None until it is published."""

    slot: int
    references: int
    key: bytes | None


class Group:
    """Pages of one layer group: free, in use, or cached and unused, oldest first."""

    def __init__(self, slots: int, window_blocks: int | None) -> None:
        self.window_blocks = window_blocks
        self.free = list(range(slots - 1, -1, -1))
        self.published: dict[bytes, Block] = {}
        self.unused: OrderedDict[bytes, Block] = OrderedDict()

    def available(self) -> int:
        """Pages that an allocation could get."""
        return len(self.free) + len(self.unused)

    def allocate(self) -> Block:
        """A private page; evicts where none is free."""
        if self.free:
            return Block(self.free.pop(), 1, None)
        key, victim = self.unused.popitem(last=False)
        del self.published[key]
        return Block(victim.slot, 1, None)

    def match(self, key: bytes) -> Block | None:
        """The published page of a key, one more reference to it."""
        block = self.published.get(key)
        if block is not None:
            if block.references == 0:
                del self.unused[key]
            block.references += 1
        return block

    def publish(self, block: Block, key: bytes) -> Block:
        """Make a page known by its key; an identical one that is known already takes its place."""
        known = self.match(key)
        if known is not None:
            self.release(block)
            return known
        block.key = key
        self.published[key] = block
        return block

    def release(self, block: Block) -> None:
        """One reference less."""
        block.references -= 1
        if block.references == 0:
            if block.key is None:
                self.free.append(block.slot)
            else:
                self.unused[block.key] = block


class ReferenceSequence:
    """One request's pages by group and block ordinal; None where a page is stale or missing."""

    def __init__(self, cache: ReferenceCache, keys: Sequence[bytes], max_blocks: int) -> None:
        self._cache = cache
        self._keys = list(keys)
        self._tail = b""
        self._committed_blocks = 0
        self._pages: list[list[Block | None]] = [[] for _ in cache.groups]
        for key in keys[:max_blocks]:
            block = cache.groups[0].match(key)
            if block is None:
                break
            self._pages[0].append(block)
            for group, pages in zip(cache.groups[1:], self._pages[1:], strict=True):
                pages.append(group.match(key))
        self._committed_blocks = len(self._pages[0])
        self.matched_tokens = self._committed_blocks * cache.tokens_per_block

    def grow(self, capacity: int) -> bool:
        """Pages for ``capacity`` tokens; False when some are missing."""
        blocks = -(-capacity // self._cache.tokens_per_block)
        missing = blocks - len(self._pages[0])
        if any(group.available() < missing for group in self._cache.groups):
            return False
        for group, pages in zip(self._cache.groups, self._pages, strict=True):
            pages.extend([group.allocate() for _ in range(missing)])
        return True

    def advance(self, history: int) -> None:
        """KV is final up to ``history``; nothing to do here."""

    def commit(self, tokens: TokenArray) -> None:
        """Publish the blocks that ``tokens`` complete and drop what the window has left behind."""
        size = self._cache.tokens_per_block
        packed = self._tail + pack_tokens(tokens)
        full = len(packed) // (4 * size)
        self._tail = packed[full * 4 * size :]
        for number in range(full):
            ordinal = self._committed_blocks + number
            if ordinal == len(self._keys):
                parent = self._keys[-1] if self._keys else self._cache.root
                start = number * 4 * size
                self._keys.append(child_key(parent, packed[start : start + 4 * size]))
            for group, pages in zip(self._cache.groups, self._pages, strict=True):
                page = pages[ordinal]
                if page is not None:
                    pages[ordinal] = group.publish(page, self._keys[ordinal])
        before, self._committed_blocks = self._committed_blocks, self._committed_blocks + full
        for group, pages in zip(self._cache.groups, self._pages, strict=True):
            if group.window_blocks is not None:
                first = max(0, before - group.window_blocks)
                for ordinal in range(first, self._committed_blocks - group.window_blocks):
                    page, pages[ordinal] = pages[ordinal], None
                    if page is not None:
                        group.release(page)

    def close(self) -> None:
        """Give everything back."""
        for group, pages in zip(self._cache.groups, self._pages, strict=True):
            for page in pages:
                if page is not None:
                    group.release(page)


class ReferenceCache:
    """The groups, and what a sequence needs to know."""

    def __init__(
        self,
        scope: bytes,
        slots: Sequence[int],
        window_blocks: Sequence[int | None],
        tokens_per_block: int,
    ) -> None:
        self.root = root_key(scope)
        self.tokens_per_block = tokens_per_block
        self.groups = [
            Group(count, window) for count, window in zip(slots, window_blocks, strict=True)
        ]

    def open(self, keys: Sequence[bytes], *, max_match: int) -> ReferenceSequence:
        """A sequence that holds the longest cached prefix in whole blocks."""
        return ReferenceSequence(self, keys, max_match // self.tokens_per_block)

    def cached_blocks(self) -> int:
        """Pages that only the cache knows, most over all groups."""
        return max(len(group.unused) for group in self.groups)


def export_tables(
    tables: Sequence[TokenArray], scale: int, bias: int, out: npt.NDArray[np.int32]
) -> None:
    """Page indices row by row, as one would write it first."""
    out.fill(0)
    for row, slots in enumerate(tables):
        out[row, : len(slots)] = np.where(slots < 0, 0, slots * scale + bias)
