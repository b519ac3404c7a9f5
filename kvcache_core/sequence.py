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

from kvcache_core.claims import claim_limit
from kvcache_core.errors import InvariantViolation, invariant
from kvcache_core.hashing import TOKEN_BYTES, Prompt, Tokens, extend_keys, pack_tokens
from kvcache_core.lease import PageLease
from kvcache_core.matching import Match, find
from kvcache_core.pages import NO_NODE, NO_PAGE
from kvcache_core.priorities import PagePriorities
from kvcache_core.publishing import publish_blocks, publish_state, publish_tail
from kvcache_core.sequence_pages import SequencePages, blocks_for
from kvcache_core.slots import Slots
from kvcache_core.snapshots import PendingSnapshot
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore, PageUser


class SequenceCache(PageUser):
    """Made by the manager's ``open`` and by :meth:`fork`; ends with :meth:`close`."""

    def __init__(self, store: CacheStore, prompt: Prompt, priorities: PagePriorities) -> None:
        self.matched_tokens = 0
        self.host_matched_tokens = 0
        """Those of them in blocks of which a page lay on the host."""
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self.is_closed = False
        self.is_suspended = False
        self._store = store
        self._prompt: Prompt | None = prompt
        """What the request began with, while all that is committed is a part of it."""
        self._scope = prompt.scope
        self._priorities = priorities
        self._id = store.new_id()
        self._tokens = bytearray()
        self._tip = NO_NODE
        self._pages = SequencePages(store, priorities)
        self._has_own_tail = False
        """Whether commit() has put tokens into the partial last block."""
        self._snapshot: PendingSnapshot | None = None
        self._announced: list[bytes] = []
        """Keys of blocks it has said it will compute, not committed yet."""
        store.sequences[self._id] = self

    @classmethod
    def matched(
        cls, store: CacheStore, prompt: Prompt, match: Match, priorities: PagePriorities
    ) -> SequenceCache:
        """A sequence that holds ``match``. For the manager."""
        sequence = cls(store, prompt, priorities)
        sequence.host_matched_tokens = sequence._attach(prompt.packed, match)
        store.counters.host_matched_tokens += sequence.host_matched_tokens
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
    def is_resident(self) -> bool:
        """False while a matched page lies on the host; grow and prefetch bring it back."""
        return self._pages.is_resident

    def extent(self, group: int) -> int:
        """One more than the last block ordinal with a page; blocks before it may be stale."""
        places = np.flatnonzero(self._pages.groups[group].pages != NO_PAGE)
        return int(places[-1]) + 1 if len(places) else 0

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

    def prefetch(self) -> bool:
        """Bring matched pages back from the host before they are needed; False if short of room."""
        return self._extend(self.capacity, self.committed)

    def announce(self, prompt: Prompt) -> None:
        """Say that this sequence will compute the full blocks of ``prompt``, so that others with
        the same prefix may wait for them. Over when they are committed, or with the sequence.
        Nothing is said by a sequence that publishes no more.
        """
        self._check_usable()
        self._retract()
        if not self._publishes:
            return
        first = self.committed // self._store.tokens_per_block
        self._announced = prompt.keys(prompt.blocks)[first : prompt.blocks]
        self._store.in_flight.update(self._announced)

    def announce_opened(self) -> None:
        """:meth:`announce` for what the sequence was opened with, while it is a part of that."""
        if self._prompt is not None:
            self.announce(self._prompt)

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
        start, committed = self.committed, self.committed + len(packed) // TOKEN_BYTES
        if committed > self.history:
            raise ValueError(f"tokens up to {committed} are not final; history is {self.history}")
        if self._prompt is not None:
            known = self._prompt.packed[start * TOKEN_BYTES : committed * TOKEN_BYTES]
            self._prompt = self._prompt if known == packed else None
        self._tokens += packed
        self.committed = committed
        self._has_own_tail = self._has_own_tail or bool(packed)
        size = self._store.tokens_per_block
        first, end = start // size, committed // size
        if first < end:
            self._publish_blocks(first, end, self._full_blocks(first, end, start, packed))
        self._pages.drop_stale(committed)

    def rewind(self, history: int) -> None:
        """Forget KV from ``history`` on; pages stay. Raises ValueError below committed."""
        self._check_usable()
        if not self.committed <= history <= self.history:
            raise ValueError(
                f"history may rewind within {self.committed}..{self.history}, got {history}"
            )
        self._pages.expect_rewrite(history, self.history)
        self.history = history

    def fork(self) -> SequenceCache | None:
        """A second sequence with the same history: full blocks shared, the partial one copied.

        None, and nothing changed, when a page is missing. The child's capacity is its history.
        """
        self._check_usable()
        pages = self._pages.fork(self.history)
        if pages is None:
            return None
        prompt = Prompt(self._scope, (), self._store.tokens_per_block)
        child = SequenceCache(self._store, prompt, self._priorities)
        child._prompt = self._prompt
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
        before; less, too, where a drafter would lack its window (claims.py). False, and still
        suspended, when pages are missing or a pool is in use beyond the manager's watermark.
        """
        if not self.is_suspended or self.is_closed:
            raise InvariantViolation("only a suspended sequence can resume")
        store, packed, wanted = self._store, bytes(self._tokens), self.history
        if store.is_crowded:
            return False
        prompt = Prompt(self._scope, self.tokens, store.tokens_per_block)
        limit = claim_limit(store, prompt, len(prompt))
        root = store.tree.root(self._scope)
        self.is_suspended = False
        self._attach(packed, find(store.groups, store.tree, root, prompt, limit))
        is_ready = False
        try:
            is_ready = self._extend(max(wanted, self.history), self.committed)
        finally:
            if not is_ready:
                self._release_all()
                self._tokens = bytearray(packed)
                self.committed, self.history = len(packed) // TOKEN_BYTES, wanted
                self.is_suspended = True
        store.counters.sequences_resumed += is_ready
        return is_ready

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

        The lease survives close. Raises ValueError for blocks without pages, or on the host.
        """
        self._check_usable()
        if not self._pages.is_resident:
            raise ValueError("pages of this sequence lie on the host; grow or prefetch first")
        if not 0 <= first_block <= end_block <= self._pages.blocks:
            raise ValueError(
                f"blocks {first_block}..{end_block} are not within the sequence's "
                f"{self._pages.blocks} blocks"
            )
        tables, pages = self._pages.transferable(first_block, end_block)
        return PageLease(self._store, first_block, end_block, tables, pages)

    def acquire_snapshot_slot(self) -> int | None:
        """A slot into which kernels write the recurrent state of a coming commit; None if full, or
        if this sequence publishes no more.

        The same slot until it is committed or released. Raises InvariantViolation unless exactly
        one recurrent group is shared.
        """
        self._check_usable()
        if self._snapshot is None and self._publishes:
            self._snapshot = PendingSnapshot.acquire(self._store, self._pages)
        return self.pending_snapshot_slot

    @property
    def pending_snapshot_slot(self) -> int | None:
        """The slot acquired for a coming snapshot."""
        return None if self._snapshot is None else self._snapshot.slot

    def release_snapshot_slot(self) -> None:
        """Give a pending snapshot up; nothing happens without one."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.release()

    def commit_with_snapshot(self, tokens: Tokens) -> bool:
        """Commit, and publish the pending snapshot at the new committed length, in a block or not.

        False when no snapshot was recorded: the block has one, publishing has stopped, or pages
        for the copy of a partial block are missing. The pending slot is given up either way.
        Raises InvariantViolation without a pending slot.
        """
        if self._snapshot is None:
            raise InvariantViolation("no pending snapshot; acquire a slot first")
        is_recorded = False
        try:
            self.commit(tokens)
            partial = self.committed % self._store.tokens_per_block
            tail = bytes(self._tokens[len(self._tokens) - partial * TOKEN_BYTES :])
            if self._publishes and self.committed:
                is_recorded = self._snapshot.publish(self._pages, self._tip, self.committed, tail)
        finally:
            self.release_snapshot_slot()
        counters = self._store.counters
        counters.snapshots_recorded += is_recorded
        counters.snapshots_skipped += not is_recorded
        return is_recorded

    def commit_with_live_snapshot(self, tokens: Tokens) -> bool:
        """Commit all that is final, and publish a copy of the live state at that length.

        Like :meth:`commit_with_snapshot`; False, too, where there is no slot for the copy. A
        pending slot is given up. Raises ValueError unless the tokens end at history.
        """
        self._check_usable()
        end = self.committed + len(tokens)
        if end != self.history:
            raise ValueError(f"the live state is that of {self.history} tokens, got {end}")
        self.release_snapshot_slot()
        if self._publishes:
            self._snapshot = PendingSnapshot.copy_live(self._store, self._pages)
        if self._snapshot is None:
            self.commit(tokens)
            self._store.counters.snapshots_skipped += 1
            return False
        return self.commit_with_snapshot(tokens)

    @override
    def used_pages(self) -> Iterable[tuple[int, Slots]]:
        for pages in self._pages.groups:
            yield pages.group.pool_group, pages.used
        if self._snapshot is not None:
            yield self._snapshot.used_page()

    @override
    def tip(self) -> int:
        return self._tip

    @override
    def check(self) -> None:
        invariant(
            self.committed <= self.history and len(self._tokens) == self.committed * TOKEN_BYTES,
            f"committed {self.committed}, history {self.history}, {len(self._tokens)} token bytes",
        )
        if self.is_suspended:
            held = sum(len(pages) for _, pages in self.used_pages())
            invariant(not held, "a suspended sequence holds pages")
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

    @property
    def _publishes(self) -> bool:
        """False once its place in the tree is lost."""
        return self._tip != NO_NODE and bool(self._store.tree.attached[self._tip])

    def _set_tip(self, node: int) -> None:
        old, self._tip = self._tip, node
        self._store.move_tip(old, node)

    def _attach(self, packed: bytes, match: Match) -> int:
        """Hold the pages of a match; there are none before. Returns its tokens on the host."""
        self._tokens = bytearray(packed[: match.tokens * TOKEN_BYTES])
        self.committed = self.history = self.capacity = match.tokens
        self._has_own_tail = False
        full = match.tokens // self._store.tokens_per_block
        self._set_tip(int(match.nodes[full - 1]) if full else self._store.tree.root(self._scope))
        return self._pages.attach(match)

    def _extend(self, capacity: int, live_at: int) -> bool:
        self._check_usable()
        if capacity < self.history:
            raise ValueError(f"capacity {capacity} is below the history of {self.history} tokens")
        if not self._pages.extend(self.history, blocks_for(capacity, self._store), live_at):
            self._store.counters.grows_refused += 1
            return False
        self.capacity = max(capacity, self.capacity)
        return True

    def _full_blocks(self, first: int, end: int, start: int, packed: bytes) -> bytes:
        """The tokens of blocks ``[first, end)``; ``packed`` are those from ``start`` on."""
        size = self._store.tokens_per_block
        if start == first * size:
            return packed[: (end - first) * size * TOKEN_BYTES]  # no copy where these are all
        with memoryview(self._tokens) as tokens:
            return tokens[first * size * TOKEN_BYTES : end * size * TOKEN_BYTES].tobytes()

    def _publish_blocks(self, first: int, end: int, packed: bytes) -> None:
        """Bring full blocks ``[first, end)`` of these tokens into the tree."""
        self._pages.private_from = max(self._pages.private_from, end)
        self._has_own_tail = self.committed % self._store.tokens_per_block > 0
        if not self._publishes:
            self._retract()  # nobody will find them
            return
        self._retract_first(end - first)
        keys = self._keys(first, end, packed)
        node = publish_blocks(self._store, self._tip, keys, packed, first, self._pages.attention)
        self._set_tip(node)

    def _keys(self, first: int, end: int, packed: bytes) -> list[bytes]:
        """Keys of blocks ``[first, end)``, those of the prompt as far as it goes."""
        if self._prompt is not None and end <= self._prompt.blocks:
            return self._prompt.keys(end)[first:end]
        keys: list[bytes] = []
        above, size = self._store.tree.key(self._tip), self._store.tokens_per_block
        extend_keys(keys, above, packed, 0, end - first, size)
        return keys

    def _retract(self) -> None:
        """Nothing is announced any more."""
        self._retract_first(len(self._announced))

    def _retract_first(self, count: int) -> None:
        """The first announced blocks are there, or will not come."""
        in_flight = self._store.in_flight
        for key in self._announced[:count]:
            in_flight[key] -= 1
            if not in_flight[key]:
                del in_flight[key]
        del self._announced[:count]

    def _publish_end(self) -> None:
        """Publish the partial last block, and live states that stand exactly at its end."""
        node = self._tip
        if not self._publishes:
            return
        full, partial = divmod(self.committed, self._store.tokens_per_block)
        states = self._pages.states if self.history == self.committed else ()
        if not partial:
            publish_state(self._store, node, states)
        elif self._has_own_tail:
            tail = bytes(self._tokens[-partial * TOKEN_BYTES :])
            publish_tail(self._store, node, tail, full, (*self._pages.attention, *states))

    def _release_all(self) -> None:
        self._retract()
        self.release_snapshot_slot()
        self._pages.release_all()
        self._pages = SequencePages(self._store, self._priorities)
        self._set_tip(NO_NODE)
