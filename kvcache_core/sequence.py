"""One sequence's hold on the cache: ``committed <= history <= capacity``.

Committed tokens are in the prefix tree, tokens below ``history`` have final KV, tokens below
``capacity`` have pages. Call :meth:`SequenceCache.grow` before writing KV at ``history`` or later:
from then on every page there is private to the sequence; pages before it may be shared and are only
read. All methods belong to the thread that owns the manager.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.errors import InvariantViolation, invariant
from kvcache_core.hashing import TOKEN_BYTES, Tokens, pack_tokens
from kvcache_core.lease import PageLease
from kvcache_core.matching import Match, find
from kvcache_core.pages import Page
from kvcache_core.publishing import publish_block, publish_state, publish_tail
from kvcache_core.sequence_pages import SequencePages, blocks_for
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore, PageUser
from kvcache_core.tree import Node


class SequenceCache(PageUser):
    """Made by the manager's ``open`` and by :meth:`fork`; ends with :meth:`close`."""

    def __init__(self, store: CacheStore, scope: bytes, priority: int) -> None:
        self.matched_tokens = 0
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self.is_closed = False
        self.is_suspended = False
        self._store = store
        self._scope = scope
        self._priority = priority
        self._id = store.new_id()
        self._tokens = bytearray()
        self._tip: Node | None = None
        self._pages = SequencePages(store, priority)
        self._has_own_tail = False
        """Whether commit() has put tokens into the partial last block."""
        self._pending_snapshot: Page | None = None
        store.sequences[self._id] = self

    @classmethod
    def matched(
        cls, store: CacheStore, scope: bytes, packed: bytes, match: Match, priority: int
    ) -> SequenceCache:
        """A sequence that holds ``match``. For the manager."""
        sequence = cls(store, scope, priority)
        sequence._attach(packed, match)
        sequence.matched_tokens = match.tokens
        return sequence

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The committed tokens, int32, a copy."""
        return np.frombuffer(bytes(self._tokens), dtype="<i4").astype(np.int32)

    @property
    def blocks(self) -> int:
        """Blocks in the block tables."""
        return self._pages.blocks

    @property
    def reused_groups(self) -> tuple[int, ...]:
        """Layer groups whose matched prefix has KV. The others must be written from the start.

        Only OPTIONAL and PRIVATE groups can be missing.
        """
        return tuple(pages.group.id for pages in self._pages.groups if not pages.publish_from)

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """Slot per block ordinal of one layer group, -1 where there is no page. Read-only int32.

        The array is updated in place until the number of blocks changes; copy it to keep it. A
        recurrent group has one entry.
        """
        return self._pages.groups[group].table()

    def decline(self, group: int) -> None:
        """Do not reuse the matched pages of an OPTIONAL group; call before the first grow.

        Raises ValueError for another policy.
        """
        self._check_usable()
        if self._store.groups[group].life_cycle.policy is not ReusePolicy.OPTIONAL:
            raise ValueError(f"layer group {group} is not OPTIONAL; only those can be declined")
        self._pages.decline(group)

    def grow(self, capacity: int) -> bool:
        """Have pages for ``capacity`` tokens, all private from ``history`` on.

        All or nothing: False, and nothing changed, when pages are missing. Raises ValueError below
        ``history``.
        """
        return self._extend(capacity, self.committed)

    def grow_to_receive(self, capacity: int) -> bool:
        """Like grow, for a prefix of ``capacity`` tokens that a transfer will write.

        Blocks that are stale once those tokens are history get no pages (-1 in the table).
        """
        return self._extend(capacity, capacity)

    def advance(self, history: int) -> None:
        """KV is final up to ``history``; windowed groups drop blocks that are stale and committed.

        Raises ValueError outside ``[self.history, self.capacity]``.
        """
        self._check_usable()
        if not self.history <= history <= self.capacity:
            raise ValueError(
                f"history may advance within {self.history}..{self.capacity}, got {history}"
            )
        self.history = history
        self._pages.drop_stale(self.committed)

    def commit(self, tokens: Tokens) -> None:
        """Verified tokens at ``[committed, committed + len(tokens))``, at most up to history.

        New full blocks enter the prefix tree; where it has the same block this sequence moves to
        the tree's page. Windowed groups drop what is stale. Raises ValueError beyond history.
        """
        self._check_usable()
        packed = pack_tokens(tokens)
        committed = self.committed + len(packed) // TOKEN_BYTES
        if committed > self.history:
            raise ValueError(f"tokens up to {committed} are not final; history is {self.history}")
        first = self.committed // self._store.tokens_per_block
        self._tokens += packed
        self.committed = committed
        self._has_own_tail = self._has_own_tail or bool(packed)
        self._publish_blocks(first, committed // self._store.tokens_per_block)
        self._pages.drop_stale(committed)

    def rewind(self, history: int) -> None:
        """Forget KV from ``history`` on; pages stay. Raises ValueError below committed."""
        self._check_usable()
        if not self.committed <= history <= self.history:
            raise ValueError(
                f"history may rewind within {self.committed}..{self.history}, got {history}"
            )
        self.history = history

    def fork(self) -> SequenceCache | None:
        """A second sequence with the same history: full blocks shared, the partial one copied.

        None, and nothing changed, when a page is missing. The child's capacity is its history.
        """
        self._check_usable()
        pages = self._pages.fork(self.history)
        if pages is None:
            return None
        child = SequenceCache(self._store, self._scope, self._priority)
        child._pages = pages
        child._tokens = bytearray(self._tokens)
        child._has_own_tail = self._has_own_tail
        child.matched_tokens = self.matched_tokens
        child.committed = self.committed
        child.history = child.capacity = self.history
        child._set_tip(self._tip)
        self._store.counters.sequences_forked += 1
        return child

    def suspend(self) -> None:
        """Give all pages up; what is committed stays in the tree until it is evicted."""
        self._check_usable()
        self._publish_end()
        self._release_all()
        self.is_suspended = True
        self._store.counters.sequences_suspended += 1

    def resume(self) -> bool:
        """Match the committed tokens again and have pages for the history there was.

        Afterwards ``history == committed`` is what the tree still had, which may be less than
        before. False, and still suspended, when pages are missing.
        """
        if not self.is_suspended or self.is_closed:
            raise InvariantViolation("only a suspended sequence can resume")
        store, packed, wanted = self._store, bytes(self._tokens), self.history
        root = store.tree.root(self._scope)
        self.is_suspended = False
        self._attach(packed, find(store.groups, store.tokens_per_block, store.tree, root, packed))
        if self._extend(max(wanted, self.history), self.committed):
            store.counters.sequences_resumed += 1
            return True
        self._release_all()
        self._tokens = bytearray(packed)
        self.committed, self.history = len(packed) // TOKEN_BYTES, wanted
        self.is_suspended = True
        return False

    def close(self) -> None:
        """Publish the partial last block of what was committed and give all pages up.

        Raises InvariantViolation the second time.
        """
        if self.is_closed:
            raise InvariantViolation("a sequence can be closed only once")
        if not self.is_suspended:
            self._publish_end()
            self._release_all()
        self.is_closed = True
        del self._store.sequences[self._id]
        self._store.counters.sequences_closed += 1

    def lease(self, first_block: int, end_block: int) -> PageLease:
        """Pin blocks ``[first_block, end_block)`` of every transferable view, and live states.

        The lease survives close. Raises ValueError for blocks without pages.
        """
        self._check_usable()
        if not 0 <= first_block <= end_block <= self._pages.blocks:
            raise ValueError(
                f"blocks {first_block}..{end_block} are not within the sequence's "
                f"{self._pages.blocks} blocks"
            )
        tables, pages = self._pages.transferable(first_block, end_block)
        return PageLease(self._store, first_block, end_block, tables, pages)

    def acquire_snapshot_slot(self) -> int | None:
        """A slot into which kernels write the recurrent state of a coming commit; None if full.

        Raises InvariantViolation unless exactly one recurrent group is shared.
        """
        self._check_usable()
        shared = [
            pages
            for pages in self._pages.states
            if pages.group.life_cycle.policy is not ReusePolicy.PRIVATE
        ]
        invariant(len(shared) == 1, f"expected one shared recurrent group, got {len(shared)}")
        if self._pending_snapshot is None:
            made = self._pages.allocate([(shared[0], [(0, None)])])
            if made is None:
                return None
            self._pending_snapshot = made[0][0]
        return self._pending_snapshot.slot

    def release_snapshot_slot(self) -> None:
        """Give a pending snapshot up; nothing happens without one."""
        page, self._pending_snapshot = self._pending_snapshot, None
        self._pages.release(page)

    def commit_with_snapshot(self, tokens: Tokens) -> bool:
        """Commit, and publish the pending snapshot at the new committed length.

        False when no snapshot was recorded (not at a block boundary, or the block has one); the
        pending slot is given up either way. Raises InvariantViolation without a pending slot.
        """
        page = self._pending_snapshot
        if page is None:
            raise InvariantViolation("no pending snapshot; acquire a slot first")
        try:
            self.commit(tokens)
            node = self._tip
            is_aligned = self.committed % self._store.tokens_per_block == 0 and self.committed > 0
            if node is None or not node.attached or not is_aligned or node.pages[page.layer_group]:
                return False
            self._store.publish(page, node)
            self._store.counters.snapshots_recorded += 1
            return True
        finally:
            self.release_snapshot_slot()

    @override
    def used_pages(self) -> Iterable[Page]:
        pages = self._pages.used()
        return pages if self._pending_snapshot is None else [*pages, self._pending_snapshot]

    @override
    def tip(self) -> Node | None:
        return self._tip

    @override
    def check(self) -> None:
        invariant(
            self.committed <= self.history and len(self._tokens) == self.committed * TOKEN_BYTES,
            f"committed {self.committed}, history {self.history}, {len(self._tokens)} token bytes",
        )
        if self.is_suspended:
            invariant(not self._pages.used(), "a suspended sequence holds pages")
            return
        invariant(
            self.history <= self.capacity <= self._pages.blocks * self._store.tokens_per_block,
            f"history {self.history}, capacity {self.capacity}, {self._pages.blocks} blocks",
        )
        self._pages.check(self.committed)

    def _check_usable(self) -> None:
        if self.is_closed or self.is_suspended:
            state = "closed" if self.is_closed else "suspended"
            raise InvariantViolation(f"this sequence is {state}")

    def _set_tip(self, node: Node | None) -> None:
        old, self._tip = self._tip, node
        self._store.move_tip(old, node)

    def _attach(self, packed: bytes, match: Match) -> None:
        """Hold the pages of a match; the sequence has none before."""
        self._tokens = bytearray(packed[: match.tokens * TOKEN_BYTES])
        self.committed = self.history = self.capacity = match.tokens
        self._has_own_tail = False
        full = match.tokens // self._store.tokens_per_block
        self._set_tip(match.blocks[full - 1] if full else self._store.tree.root(self._scope))
        self._pages.attach(match)

    def _extend(self, capacity: int, live_at: int) -> bool:
        self._check_usable()
        if capacity < self.history:
            raise ValueError(f"capacity {capacity} is below the history of {self.history} tokens")
        if not self._pages.extend(self.history, blocks_for(capacity, self._store), live_at):
            self._store.counters.grows_refused += 1
            return False
        self.capacity = max(capacity, self.capacity)
        return True

    def _publish_blocks(self, first: int, end: int) -> None:
        """Bring full blocks ``[first, end)`` into the tree."""
        if first == end:
            return
        self._pages.private_from = max(self._pages.private_from, end)
        self._has_own_tail = self.committed % self._store.tokens_per_block > 0
        node = self._tip
        if node is None or not node.attached:
            return
        size = self._store.tokens_per_block * TOKEN_BYTES
        stored: list[bytes] = []
        parent = node.key
        for ordinal in range(first, end):
            tokens = bytes(self._tokens[ordinal * size : (ordinal + 1) * size])
            groups = self._pages.attention
            node, is_new = publish_block(self._store, node, tokens, ordinal, groups)
            if is_new:
                stored.append(node.key)
            else:
                parent = node.key
        if stored:
            self._store.counters.blocks_stored += len(stored)
            self._store.events.stored(parent, stored)
        self._set_tip(node)

    def _publish_end(self) -> None:
        """Publish the partial last block, and live states that stand exactly at its end."""
        node = self._tip
        if node is None or not node.attached:
            return
        full, partial = divmod(self.committed, self._store.tokens_per_block)
        states = self._pages.states if self.history == self.committed else ()
        if not partial:
            publish_state(self._store, node, states)
        elif self._has_own_tail:
            tail = bytes(self._tokens[-partial * TOKEN_BYTES :])
            publish_tail(self._store, node, tail, full, (*self._pages.attention, *states))

    def _release_all(self) -> None:
        self.release_snapshot_slot()
        self._pages.release_all()
        self._pages = SequencePages(self._store, self._priority)
        self._set_tip(None)
