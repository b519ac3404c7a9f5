"""From a byte quota to slots per pool group.

Full-attention groups hold every token, windowed groups hold the live window of each sequence that
may be resident or cached, recurrent groups hold states and snapshots. The equal-token rule caps a
windowed group: it never holds more tokens than the full groups do. Floors let one full context
chunk of a long sequence fit in every group, so that a sequence alone in the pools always moves on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.arithmetic import ceil_div
from kvcache_core.groups import LayerGroup, PoolGroup


@dataclass(frozen=True, kw_only=True)
class SizingDemand:
    """What the engine will ask of the pools.

    ``append_tokens`` is the widest write beyond a sequence's history in decode (1, or the drafter's
    block width); ``typical_sequence_tokens`` says how many windows a given number of tokens needs.
    """

    chunk_tokens: int = 512
    resident_sequences: int = 1
    append_tokens: int = 1
    typical_sequence_tokens: int = 2048
    snapshots_per_sequence: int = 1


DEFAULT_DEMAND = SizingDemand()


def floor_slots(group: LayerGroup, tokens_per_block: int, demand: SizingDemand) -> int:
    """Slots without which one full context chunk does not fit in ``group``."""
    if group.life_cycle.is_state:
        return 1 + demand.snapshots_per_sequence
    append = max(demand.chunk_tokens, demand.append_tokens)
    if group.life_cycle.window is None:
        return ceil_div(append, tokens_per_block) + 1
    return group.life_cycle.most_live_blocks(append, tokens_per_block)


def _group_slots(
    group: LayerGroup, tokens_per_block: int, blocks: int, demand: SizingDemand
) -> int:
    """Slots of one group when the full-attention groups hold ``blocks`` blocks."""
    floor = floor_slots(group, tokens_per_block, demand)
    if group.life_cycle.is_full:
        return max(floor, blocks)
    typical = ceil_div(blocks * tokens_per_block, demand.typical_sequence_tokens)
    sequences = max(demand.resident_sequences, typical)
    if group.life_cycle.is_state:
        return max(floor, sequences * (1 + demand.snapshots_per_sequence))
    live = group.life_cycle.most_live_blocks(demand.append_tokens, tokens_per_block)
    wanted = sequences * live + ceil_div(demand.chunk_tokens, tokens_per_block)
    return max(floor, min(blocks, wanted))


def slots_for(
    layer_groups: Sequence[LayerGroup],
    pool_groups: Sequence[PoolGroup],
    tokens_per_block: int,
    quota_bytes: int,
    demand: SizingDemand,
) -> tuple[int, ...]:
    """The most slots per pool group within the quota; ValueError when the floors exceed it."""

    def slots(blocks: int) -> tuple[int, ...]:
        return tuple(
            sum(
                _group_slots(layer_groups[group], tokens_per_block, blocks, demand)
                for group in pool.layer_groups
            )
            for pool in pool_groups
        )

    def size(blocks: int) -> int:
        counts = zip(slots(blocks), pool_groups, strict=True)
        return sum(count * pool.bytes_per_slot for count, pool in counts)

    if size(0) > quota_bytes:
        raise ValueError(
            f"a quota of {quota_bytes} bytes holds no full context chunk of {demand.chunk_tokens} "
            f"tokens, which needs {size(0)} bytes; raise the cache bytes or lower the batch tokens"
        )
    low = 0
    smallest = min(pool.bytes_per_slot for pool in pool_groups)
    high = (quota_bytes // smallest + 1) * (demand.typical_sequence_tokens // tokens_per_block + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if size(middle) <= quota_bytes:
            low = middle
        else:
            high = middle - 1
    return slots(low)


def sequence_capacity_blocks(
    layer_groups: Sequence[LayerGroup],
    pool_groups: Sequence[PoolGroup],
    tokens_per_block: int,
    slots: Sequence[int],
    demand: SizingDemand,
) -> int:
    """Blocks of the longest sequence that can live alone; sys.maxsize // tokens without full
    groups.
    """
    longest = sys.maxsize // tokens_per_block
    for count, pool in zip(slots, pool_groups, strict=True):
        groups = [layer_groups[group] for group in pool.layer_groups]
        full = sum(group.life_cycle.is_full for group in groups)
        bounded = sum(
            floor_slots(group, tokens_per_block, demand)
            for group in groups
            if not group.life_cycle.is_full
        )
        if full:
            longest = min(longest, max(0, (count - bounded) // full))
        elif count < bounded:
            return 0
    return longest
