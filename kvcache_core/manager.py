"""The KV cache of one rank: target and draft layers in one manager.

Device free and deterministic: the same calls give the same slots, so ranks that apply the same
operations hold the same tables. Physical copies go through the PageCopier port. One thread owns a
manager, its sequences and its leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache_core.checking import check_store
from kvcache_core.counters import CacheCounters
from kvcache_core.events import CacheEvent
from kvcache_core.hashing import Tokens, pack_tokens
from kvcache_core.layout import LayoutPlan
from kvcache_core.matching import find
from kvcache_core.pages import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, PoolUsage
from kvcache_core.ports import PageCopier
from kvcache_core.sequence import SequenceCache
from kvcache_core.store import CacheStore


class UnifiedKVCacheManager:
    """Prefix tree and pages of all layer groups of ``plan``, with ``slots`` per pool group."""

    def __init__(
        self, plan: LayoutPlan, slots: Sequence[int], copier: PageCopier, *, incarnation: str
    ) -> None:
        if len(slots) != len(plan.pool_groups) or any(count < 1 for count in slots):
            raise ValueError(
                f"expected a positive slot count for each of {len(plan.pool_groups)} pool groups, "
                f"got {tuple(slots)}"
            )
        self.plan = plan
        self.incarnation = incarnation
        self._store = CacheStore(plan, slots, copier, incarnation)

    @property
    def counters(self) -> CacheCounters:
        """What happened since the start; read only."""
        return self._store.counters

    def probe(self, scope: bytes, tokens: Tokens) -> int:
        """Tokens that :meth:`open` would reuse now. Changes nothing."""
        store = self._store
        root = store.tree.existing_root(scope)
        if root is None:
            return 0
        packed = pack_tokens(tokens)
        return find(store.groups, store.tokens_per_block, store.tree, root, packed).tokens

    def open(
        self, scope: bytes, tokens: Tokens, *, max_match: int, priority: int = DEFAULT_PRIORITY
    ) -> SequenceCache:
        """A sequence that holds the longest reusable prefix of ``tokens``, at most ``max_match``.

        Takes no pages: a partly matched last block is shared until the first grow copies it.
        ``priority`` 0..100 says how long its pages deserve to stay cached. Raises ValueError.
        """
        if max_match < 0:
            raise ValueError(f"max_match must not be negative, got {max_match}")
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be in {MIN_PRIORITY}..{MAX_PRIORITY}, got {priority}")
        store = self._store
        packed = pack_tokens(tokens[:max_match])
        root = store.tree.root(scope)
        match = find(store.groups, store.tokens_per_block, store.tree, root, packed)
        counters = store.counters
        counters.sequences_opened += 1
        counters.queried_tokens += len(packed) // 4
        counters.matched_tokens += match.tokens
        counters.partial_matches += match.tokens % store.tokens_per_block > 0
        return SequenceCache.matched(store, scope, packed, match, priority)

    def can_hold(self, lengths: Iterable[int]) -> bool:
        """Whether sequences of these lengths (tokens with final KV) fit at once in empty pools."""
        needs = [0] * len(self._store.pools)
        for tokens in lengths:
            for pool_group, slots in enumerate(self.plan.resident_slots(tokens)):
                needs[pool_group] += slots
        pools = zip(needs, self._store.pools, strict=True)
        return all(need <= pool.slots.num_slots for need, pool in pools)

    def available_blocks(self) -> int:
        """Blocks an allocation could get: free plus evictable, least over all pool groups."""
        return min(pool.available for pool in self._store.pools)

    def total_blocks(self) -> int:
        """Slots of the smallest pool group."""
        return min(pool.slots.num_slots for pool in self._store.pools)

    def free_blocks(self) -> int:
        """Slots that nothing occupies, least over all pool groups."""
        return min(pool.slots.free for pool in self._store.pools)

    def cached_blocks(self) -> int:
        """Evictable slots that only the prefix tree knows, most over all pool groups."""
        return max(pool.cached for pool in self._store.pools)

    def leased_blocks(self) -> int:
        """Slots that transfers may touch, quarantined ones included, most over all pool groups."""
        return max(pool.leased for pool in self._store.pools)

    def quarantined_blocks(self) -> int:
        """Slots out of circulation because an access is in doubt, most over all pool groups."""
        return max(pool.quarantined for pool in self._store.pools)

    def usage(self) -> tuple[PoolUsage, ...]:
        """Exact counts of every pool group."""
        return tuple(pool.usage() for pool in self._store.pools)

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, oldest first."""
        return self._store.events.take()

    def clear(self) -> None:
        """Forget all prefixes. Open sequences keep their pages but publish no more."""
        self._store.clear()

    def check(self) -> None:
        """Recompute every invariant from scratch; raises InvariantViolation. For tests: O(all)."""
        check_store(self._store)
