"""Which worker is believed to hold which blocks, and how many conversations share a block.

Blocks are known by the first 8 bytes of their key in the sha256 chain. A collision gives a wrong
hint, never a wrong answer: workers match by the whole key. What a worker holds is bounded by its
capacity, least recently used blocks of the longest sequences first, so that the index forgets about
when the worker does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from transfer.identity import Incarnation

KEY_BYTES = 8


class PrefixIndex:
    """Block key -> set of workers (as a bit mask), with one LRU a worker."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[Incarnation, int] = {}
        self._workers: dict[int, Incarnation] = {}
        self._held: dict[Incarnation, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def insert(self, worker: Incarnation, keys: Sequence[bytes], capacity_blocks: int) -> None:
        """``worker`` holds the blocks of ``keys``, at most ``capacity_blocks`` of all that were
        inserted.
        """
        held = self._held.get(worker)
        if held is None:
            held = self._admit(worker)
        bit = self._bits[worker]
        for key in reversed(keys):  # the root last: leaves are forgotten first
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                self._holders[key] = self._holders.get(key, 0) | bit
        while len(held) > capacity_blocks:
            key, _ = held.popitem(last=False)
            self._clear(key, bit)

    def remove(self, worker: Incarnation, keys: Sequence[bytes]) -> None:
        """``worker`` no longer holds these blocks; unknown ones are ignored."""
        held = self._held.get(worker)
        if held is None:
            return
        for key in keys:
            if key in held:
                del held[key]
                self._clear(key, self._bits[worker])

    def forget(self, worker: Incarnation) -> None:
        """Drop everything about an incarnation."""
        held = self._held.pop(worker, None)
        if held is None:
            return
        bit = self._bits.pop(worker)
        del self._workers[bit]
        for key in held:
            self._clear(key, bit)

    def match(self, keys: Sequence[bytes]) -> dict[Incarnation, int]:
        """Leading blocks of ``keys`` that each worker holds; workers that hold none are left
        out.
        """
        depths: dict[Incarnation, int] = {}
        remaining = -1
        for depth, key in enumerate(keys):
            holders = self._holders.get(key, 0) & remaining
            if depth and holders != remaining:
                self._settle(depths, remaining & ~holders, depth)
            remaining = holders
            if not remaining:
                return depths
        if keys:
            self._settle(depths, remaining, len(keys))
        return depths

    def held_blocks(self, worker: Incarnation) -> int:
        """Number of blocks that ``worker`` is believed to hold."""
        return len(self._held.get(worker, ()))

    def check(self) -> None:
        """Recompute the masks. Raises RuntimeError when they differ from the workers' own sets."""
        expected: dict[bytes, int] = {}
        for worker, held in self._held.items():
            for key in held:
                expected[key] = expected.get(key, 0) | self._bits[worker]
        if expected != self._holders:
            raise RuntimeError("prefix index: masks differ from what the workers hold")

    def _admit(self, worker: Incarnation) -> OrderedDict[bytes, None]:
        bit = 1
        while bit in self._workers:
            bit <<= 1
        self._bits[worker] = bit
        self._workers[bit] = worker
        held: OrderedDict[bytes, None] = OrderedDict()
        self._held[worker] = held
        return held

    def _clear(self, key: bytes, bit: int) -> None:
        mask = self._holders[key] & ~bit
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]

    def _settle(self, depths: dict[Incarnation, int], mask: int, depth: int) -> None:
        while mask:
            bit = mask & -mask
            depths[self._workers[bit]] = depth
            mask ^= bit


class ConversationPrefixes:
    """How many conversations have each block in their latest prompt: tells shared preambles from
    own history.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._counts: dict[bytes, int] = {}
        self._keys: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self._stored_blocks = 0

    def __len__(self) -> int:
        return len(self._keys)

    def record(self, conversation_id: str, keys: tuple[bytes, ...]) -> None:
        """``keys`` are the blocks of the conversation's latest prompt."""
        previous = self._keys.pop(conversation_id, ())
        common = 0
        for old, new in zip(previous, keys, strict=False):
            if old != new:
                break
            common += 1
        self._decrement(previous[common:])
        for key in keys[common:]:
            self._counts[key] = self._counts.get(key, 0) + 1
        self._stored_blocks += len(keys) - len(previous)
        self._keys[conversation_id] = keys
        while self._stored_blocks > self._max_blocks and len(self._keys) > 1:
            _, evicted = self._keys.popitem(last=False)
            self._stored_blocks -= len(evicted)
            self._decrement(evicted)

    def shared_blocks(self, keys: Sequence[bytes], fan_out: int) -> int:
        """Leading blocks that more than ``fan_out`` conversations have: the shared preamble."""
        depth = 0
        for key in keys:
            if self._counts.get(key, 0) <= fan_out:
                break
            depth += 1
        return depth

    def check(self) -> None:
        """Recompute the counts. Raises RuntimeError when they differ."""
        expected: dict[bytes, int] = {}
        for keys in self._keys.values():
            for key in keys:
                expected[key] = expected.get(key, 0) + 1
        if expected != self._counts:
            raise RuntimeError("conversation prefixes: counts differ from the stored prompts")
        if self._stored_blocks != sum(map(len, self._keys.values())):
            raise RuntimeError("conversation prefixes: the stored number of blocks is wrong")

    def _decrement(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            count = self._counts[key] - 1
            if count:
                self._counts[key] = count
            else:
                del self._counts[key]
