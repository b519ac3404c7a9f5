"""What pools of a quota will hold, computed from the slots that construction will allocate.

Nothing is modelled twice: the estimate inverts the arithmetic of sizing.py on its own result. Every
sequence that may hold pages, preemption headroom included, takes scratch in every attention layer,
target and draft; that many tokens are not promised to anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.groups import GroupTable
from kvcache_core.sizing import counts_for_blocks, floor_counts, ratios_of, slots_for
from kvcache_core.sizing_demand import SizingDemand


@dataclass(frozen=True, kw_only=True)
class CacheEstimate:
    """``tokens`` of history fit beside the scratch; ``slots`` are those of construction."""

    slots: tuple[int, ...]
    bytes: int
    tokens: int
    scratch_tokens: int
    """Of all sequences together, at the decode site."""
    scratch_bytes: int
    """The same in bytes of all attention layers, target and draft."""
    token_bytes: int
    """Bytes a token takes in all attention layers before any page is stale."""
    floor_slots: tuple[int, ...]
    """Slots per pool group below which nothing runs."""


def estimate(table: GroupTable, quota_bytes: int, demand: SizingDemand) -> CacheEstimate:
    """Raises ValueError like :func:`kvcache_core.sizing.slots_for`."""
    slots = slots_for(table, quota_bytes, demand)
    block_bytes = sum(
        group.bytes_per_slot for group in table.layer_groups if not group.life_cycle.is_state
    )
    scratch = demand.sequences * demand.decode_tokens
    held = blocks_within(table, slots, demand) * table.tokens_per_block
    return CacheEstimate(
        slots=slots,
        bytes=sum(
            count * pool.bytes_per_slot
            for count, pool in zip(slots, table.pool_groups, strict=True)
        ),
        tokens=max(0, held - demand.scratch_and_dummy_tokens(table.tokens_per_block)),
        scratch_tokens=scratch,
        scratch_bytes=scratch * block_bytes // table.tokens_per_block,
        token_bytes=-(-block_bytes // table.tokens_per_block),
        floor_slots=table.pool_slots(floor_counts(table, demand)),
    )


def blocks_within(table: GroupTable, slots: Sequence[int], demand: SizingDemand) -> int:
    """The most blocks of tokens whose pools :func:`slots_for` would make no larger than ``slots``.

    Where shares decide the sizes, states count with their floors: a missing snapshot costs reuse,
    not tokens.
    """
    floors = floor_counts(table, demand)
    by_shares = ratios_of(table, demand) is not None

    def fits(blocks: int) -> bool:
        counts = list(counts_for_blocks(table, blocks, demand))
        if by_shares:
            for group in table.layer_groups:
                if group.life_cycle.is_state:
                    counts[group.id] = floors[group.id]
        needed = table.pool_slots(counts)
        return all(need <= have for need, have in zip(needed, slots, strict=True))

    low = 0
    high = (max(slots) + 1) * (demand.typical_sequence_tokens // table.tokens_per_block + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
