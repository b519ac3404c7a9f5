"""Layouts and a memory that betrays wrong pages, for the tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier, SlotArray
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
    recurrent_layer,
)

TARGET, DRAFT = KVCacheLayerOwner.TARGET, KVCacheLayerOwner.DRAFT
SCOPE = b"model"
BLOCK = 4


def layer(
    layer_id: int,
    *,
    window: int | None = None,
    sinks: int = 0,
    heads: int = 1,
    owner: KVCacheLayerOwner = TARGET,
    policy: ReusePolicy = ReusePolicy.REQUIRED,
) -> KVCacheLayerSpec:
    """A small attention layer; ``heads`` decides which pool group it falls into."""
    return KVCacheLayerSpec(
        layer_id=layer_id,
        owner=owner,
        dtype=ElementType.FLOAT32,
        num_kv_heads=heads,
        head_dim=4,
        window=window,
        sink_tokens=sinks,
        policy=policy,
    )


def state_layer(layer_id: int, policy: ReusePolicy = ReusePolicy.REQUIRED) -> KVCacheLayerSpec:
    """A small recurrent layer."""
    state = BufferSpec(
        role=BufferRole.RECURRENT_STATE,
        dtype=ElementType.FLOAT32,
        num_heads=2,
        elements_per_head=48,
    )
    return recurrent_layer(layer_id, TARGET, [state], policy)


LAYOUTS: dict[str, list[KVCacheLayerSpec]] = {
    "full": [layer(0), layer(1)],
    "mixed, one pool group": [layer(0), layer(1, window=6)],
    "mixed, two pool groups": [layer(0, heads=3), layer(1, window=9), layer(2, window=9)],
    "windows only": [layer(0, window=7), layer(1, window=13)],
    "sinks": [layer(0), layer(1, window=6, sinks=5)],
    "sinks, own pool": [layer(0, heads=3), layer(1, window=6, sinks=5)],
    "optional draft": [
        layer(0),
        layer(1, window=6, owner=DRAFT, policy=ReusePolicy.OPTIONAL),
        layer(2, heads=2, owner=DRAFT, policy=ReusePolicy.OPTIONAL),
    ],
    "private draft": [layer(0), layer(1, owner=DRAFT, policy=ReusePolicy.PRIVATE)],
    "recurrent": [layer(0), state_layer(1)],
}


def plan_of(name: str, tokens_per_block: int = BLOCK) -> LayoutPlan:
    """The plan of one of LAYOUTS."""
    return LayoutPlan.derive(LAYOUTS[name], tokens_per_block=tokens_per_block)


class Memory(PageCopier):
    """One stamp a token slot. A stamp is the whole token prefix it was computed from."""

    def __init__(
        self, plan: LayoutPlan, slots: Sequence[int], host_slots: Sequence[int] = ()
    ) -> None:
        self.plan = plan
        self.copies: list[tuple[int, int, int]] = []
        self.demoted: list[tuple[int, int, int]] = []
        self.onboarded: list[tuple[int, int, int]] = []
        self.fail_copies = False
        blank: list[object] = [None] * plan.tokens_per_block
        self.content = [[list(blank) for _ in range(count)] for count in slots]
        self.host = [[list(blank) for _ in range(count)] for count in host_slots]

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        pool = self.content[pool_group]
        self._copy(pool_group, (pool, sources), (pool, targets), self.copies)

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        device, host = self.content[pool_group], self.host[pool_group]
        self._copy(pool_group, (device, device_slots), (host, host_slots), self.demoted)

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        device, host = self.content[pool_group], self.host[pool_group]
        self._copy(pool_group, (host, host_slots), (device, device_slots), self.onboarded)

    def _copy(
        self,
        pool_group: int,
        source: tuple[list[list[object]], SlotArray],
        target: tuple[list[list[object]], SlotArray],
        log: list[tuple[int, int, int]],
    ) -> None:
        if self.fail_copies:
            raise OSError("copy engine is gone")
        for old, new in zip(source[1].tolist(), target[1].tolist(), strict=True):
            log.append((pool_group, old, new))
            target[0][new] = list(source[0][old])

    def write(
        self, sequence: SequenceCache, tokens: Sequence[int], start: int, end: int, group: int
    ) -> None:
        """Write KV of positions ``[start, end)`` of one layer group where it has pages."""
        table = sequence.block_table(group)
        layer_group = self.plan.layer_groups[group]
        pool = self.content[layer_group.pool_group]
        if layer_group.life_cycle.is_state:
            pool[int(table[0])][0] = tuple(tokens[:end])
            return
        for position in range(start, end):
            block, offset = divmod(position, self.plan.tokens_per_block)
            if table[block] >= 0:
                pool[int(table[block])][offset] = tuple(tokens[: position + 1])

    def verify(
        self, sequence: SequenceCache, tokens: Sequence[int], history: int, group: int
    ) -> None:
        """Every page that a token at ``history`` can see holds this very prefix."""
        table = sequence.block_table(group)
        layer_group = self.plan.layer_groups[group]
        pool = self.content[layer_group.pool_group]
        if layer_group.life_cycle.is_state:
            if history:
                assert pool[int(table[0])][0] == tuple(tokens[:history])
            return
        size = self.plan.tokens_per_block
        start, end = layer_group.life_cycle.stale_range(history, size)
        for position in range(history):
            block, offset = divmod(position, size)
            if not start <= block < end:
                assert table[block] >= 0, f"block {block} of group {group} has no page"
                stamp = pool[int(table[block])][offset]
                assert stamp == tuple(tokens[: position + 1]), f"position {position}: {stamp}"


class Rig:
    """A manager with its memory."""

    def __init__(
        self,
        name: str,
        slots: int | list[int],
        tokens_per_block: int = BLOCK,
        host_slots: int = 0,
    ) -> None:
        self.plan = plan_of(name, tokens_per_block)
        counts = slots if isinstance(slots, list) else [slots] * len(self.plan.pool_groups)
        hosted = [host_slots] * len(self.plan.pool_groups)
        self.memory = Memory(self.plan, counts, hosted)
        self.manager = UnifiedKVCacheManager(
            self.plan, counts, self.memory, incarnation="worker@0", host_slots=hosted
        )
        self.groups = range(len(self.plan.layer_groups))

    def open(self, tokens: Sequence[int], *, max_match: int | None = None) -> SequenceCache:
        """Open with at most all but the last token matched."""
        limit = max(0, len(tokens) - 1) if max_match is None else max_match
        return self.manager.open(SCOPE, tokens, max_match=limit)

    def compute(self, sequence: SequenceCache, tokens: Sequence[int]) -> bool:
        """Grow to all of ``tokens``, write their KV, advance and commit."""
        fresh = sequence.history == sequence.matched_tokens
        if not sequence.grow(len(tokens)):
            return False
        for group in self.groups:
            rebuilt = fresh and group not in sequence.reused_groups
            start = 0 if rebuilt else sequence.history
            self.memory.write(sequence, tokens, start, len(tokens), group)
        sequence.advance(len(tokens))
        sequence.commit(tokens[sequence.committed : len(tokens)])
        return True

    def run(self, tokens: Sequence[int]) -> SequenceCache:
        """Open and compute ``tokens``; the pools must be large enough."""
        sequence = self.open(tokens)
        assert self.compute(sequence, tokens)
        self.manager.check()
        return sequence

    def cache(self, tokens: Sequence[int]) -> None:
        """Compute ``tokens`` and leave them in the tree."""
        self.run(tokens).close()
        self.manager.check()

    def verify(self, sequence: SequenceCache, tokens: Sequence[int]) -> None:
        """All groups of a computed sequence hold its own prefix."""
        for group in self.groups:
            self.memory.verify(sequence, tokens, sequence.history, group)
