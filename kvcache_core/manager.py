"""The KV cache of one rank: target and draft layers in one manager.

Device free and deterministic: the same calls give the same slots, so ranks that apply the same
operations hold the same tables. Physical copies go through the PageCopier port. One thread owns a
manager, its sequences and its leases. A subclass may override the hooks, and nothing else that
others call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache_core.branch_choice import BranchChoice
from kvcache_core.checking import check_store
from kvcache_core.claims import claim_limit
from kvcache_core.counters import CacheCounters
from kvcache_core.events import CacheEvent
from kvcache_core.hashing import Prompt, Tokens
from kvcache_core.hooks import HookBase, hook
from kvcache_core.layout import LayoutPlan
from kvcache_core.matching import find
from kvcache_core.pages import PoolUsage
from kvcache_core.ports import PageCopier
from kvcache_core.priorities import PagePriorities
from kvcache_core.reuse import Reuse, count_match, look
from kvcache_core.sequence import SequenceCache
from kvcache_core.sizing_demand import SizingDemand
from kvcache_core.store import CacheStore


class UnifiedKVCacheManager(HookBase):
    """Prefix tree and pages of all layer groups of ``plan``, with ``slots`` per pool group on the
    device and ``host_slots`` in host memory, to which pages go when the device needs room. No
    suspended sequence resumes while a pool is in use beyond ``resume_watermark``; 1 is no limit.
    States of prompts below ``low_priority_snapshot_prompt_len`` tokens are lost first.
    """

    def __init__(
        self,
        plan: LayoutPlan,
        slots: Sequence[int],
        copier: PageCopier,
        *,
        incarnation: str,
        host_slots: Sequence[int] = (),
        resume_watermark: float = 1.0,
        low_priority_snapshot_prompt_len: int = 0,
    ) -> None:
        if len(slots) != len(plan.pool_groups) or any(count < 1 for count in slots):
            raise ValueError(
                f"expected a positive slot count for each of {len(plan.pool_groups)} pool groups, "
                f"got {tuple(slots)}"
            )
        host_slots = tuple(host_slots) or (0,) * len(slots)
        if len(host_slots) != len(slots) or any(count < 0 for count in host_slots):
            raise ValueError(
                f"expected host slots for each of {len(slots)} pool groups or none at all, "
                f"got {host_slots}"
            )
        if not 0 < resume_watermark <= 1:
            raise ValueError(
                f"expected a resume_watermark within 0..1 and above 0, got {resume_watermark}"
            )
        self.plan = plan
        self.incarnation = incarnation
        self._store = CacheStore(plan, slots, host_slots, copier, incarnation, resume_watermark)
        self._dummies: tuple[int, ...] | None = None
        self._low_priority_snapshot_prompt_len = low_priority_snapshot_prompt_len

    @classmethod
    @hook
    def slots_for(cls, plan: LayoutPlan, quota_bytes: int, demand: SizingDemand) -> tuple[int, ...]:
        """Slots per pool group to make a manager of this class with, within a quota of bytes.

        Raises ValueError when the quota does not hold one full context chunk.
        """
        return plan.slots_for(quota_bytes, demand)

    @classmethod
    @hook
    def floor_slots(cls, plan: LayoutPlan, demand: SizingDemand) -> tuple[int, ...]:
        """Slots per pool group below which nothing runs: every group of the plan counts, the
        drafter's too.
        """
        return plan.floor_slots(demand)

    @hook
    def prompt_priorities(self, prompt_tokens: int) -> PagePriorities:
        """How long pages of a prompt of so many tokens deserve to stay cached."""
        return PagePriorities.of_prompt(prompt_tokens, self._low_priority_snapshot_prompt_len)

    @property
    def counters(self) -> CacheCounters:
        """What happened since the start; read only."""
        return self._store.counters

    def prompt(self, scope: bytes, tokens: Tokens) -> Prompt:
        """Tokens with their block keys, hashed as far as is asked for: made once a request."""
        return Prompt(scope, tokens, self.plan.tokens_per_block)

    def probe(self, scope: bytes, tokens: Tokens) -> int:
        """Tokens that :meth:`open` would reuse now. Changes nothing."""
        return self.look(self.prompt(scope, tokens)).reusable_tokens

    def look(self, prompt: Prompt) -> Reuse:
        """What of a prompt is here or on its way, and why no more of it. Changes nothing."""
        return look(self._store, prompt)

    def claim_limit(self, prompt: Prompt, max_match: int) -> int:
        """The ``max_match`` for a request that computes its prompt here, at most ``max_match``.

        Less where a drafter that needs the target's hidden states would lack its window
        (:func:`kvcache_core.claims.claim_limit`). Changes nothing.
        """
        return min(max_match, claim_limit(self._store, prompt, max_match))

    def open(
        self,
        scope: bytes,
        tokens: Tokens,
        *,
        max_match: int,
        priorities: PagePriorities | None = None,
    ) -> SequenceCache:
        """A sequence that holds the longest reusable prefix of ``tokens``, at most ``max_match``.

        See :meth:`open_prompt`.
        """
        return self.open_prompt(
            self.prompt(scope, tokens), max_match=max_match, priorities=priorities
        )

    def open_prompt(
        self,
        prompt: Prompt,
        *,
        max_match: int,
        priorities: PagePriorities | None = None,
    ) -> SequenceCache:
        """A sequence that holds the longest reusable prefix of ``prompt``, at most ``max_match``.

        Takes no pages: a partly matched last block is shared until the first grow copies it, pages
        on the host are brought back by the first grow. ``priorities`` say how long its pages
        deserve to stay cached; None: :meth:`prompt_priorities`. Raises ValueError for a negative
        limit or another block size.
        """
        if max_match < 0:
            raise ValueError(f"max_match must not be negative, got {max_match}")
        store = self._store
        if prompt.tokens_per_block != store.tokens_per_block:
            raise ValueError(
                f"expected keys of blocks of {store.tokens_per_block} tokens, got "
                f"{prompt.tokens_per_block}"
            )
        root = store.tree.root(prompt.scope)
        match = find(store.groups, store.tree, root, prompt, max_match)
        count_match(store, root, prompt, match, max_match)
        if priorities is None:
            priorities = self.prompt_priorities(len(prompt))
        return SequenceCache.matched(store, prompt, match, priorities)

    @property
    def has_announced(self) -> bool:
        """Whether any sequence has announced blocks that it has not committed yet."""
        return bool(self._store.in_flight)

    def is_announced(self, key: bytes) -> bool:
        """Whether a sequence has announced the block with this key and not committed it yet."""
        return key in self._store.in_flight

    def count_prefix_wait(self) -> None:
        """A request waits for blocks that another one is computing."""
        self._store.counters.prefix_waits += 1

    def count_snapshot_asked(self) -> None:
        """A request is asked for a snapshot at some point of its prompt."""
        self._store.counters.snapshots_asked += 1

    def count_branch(self, choice: BranchChoice) -> None:
        """A branch point was taken, or skipped for a reason."""
        self._store.counters.branches[choice] += 1

    def dummy_slots(self) -> tuple[int, ...]:
        """One slot per pool group that no sequence ever has: where padding rows of a batch write.

        The same slots at every call. Raises InvariantViolation when a pool has none to give at the
        first.
        """
        if self._dummies is None:
            self._dummies = self._store.reserve()
        return self._dummies

    def can_hold(self, lengths: Iterable[int]) -> bool:
        """Whether sequences of these lengths (tokens with final KV) fit at once in empty pools."""
        needs = [0] * len(self._store.pools)
        for tokens in lengths:
            for pool_group, slots in enumerate(self.plan.resident_slots(tokens)):
                needs[pool_group] += slots
        pools = zip(needs, self._store.pools, strict=True)
        return all(need <= pool.usable for need, pool in pools)

    def available_blocks(self) -> int:
        """Blocks an allocation could get: free plus evictable, least over all pool groups."""
        return min(pool.available for pool in self._store.pools)

    def total_blocks(self) -> int:
        """Slots of the smallest pool group."""
        return min(pool.num_device_slots for pool in self._store.pools)

    def free_blocks(self) -> int:
        """Slots that nothing occupies, least over all pool groups."""
        return min(pool.device.free for pool in self._store.pools)

    def cached_blocks(self) -> int:
        """Evictable slots that only the prefix tree knows, most over all pool groups."""
        return max(pool.device_queue.count for pool in self._store.pools)

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

    def resynchronise(self) -> None:
        """Tell the whole truth again: CacheCleared, then BlocksStored for every block there is.

        For a subscriber that missed events; others read it as a cache that was emptied and filled.
        """
        self._store.tell_everything()

    def clear(self) -> None:
        """Forget all prefixes. Open sequences keep their pages but publish no more."""
        self._store.clear()

    def check(self) -> None:
        """Recompute every invariant from scratch; raises InvariantViolation. For tests: O(all)."""
        check_store(self._store)
