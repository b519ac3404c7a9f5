"""From a byte quota to slots per pool group.

Full-attention groups hold every token, windowed groups hold the live window of each sequence that
may be resident or cached, recurrent groups hold states and snapshots. The equal-token rule caps a
windowed group: it never holds more tokens than the full groups do. Floors let one full context
chunk of a long sequence fit in every group, so that a sequence alone in the pools always moves on.
Given shares or a typical step replace the counts (sizing_ratios.py); the floors stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvcache_core.arithmetic import ceil_div
from kvcache_core.groups import GroupTable, LayerGroup
from kvcache_core.sizing_demand import DEFAULT_DEMAND, SizingDemand
from kvcache_core.sizing_ratios import counts_for_ratios, insert_draft_shares, step_ratios

__all__ = ["DEFAULT_DEMAND", "SizingDemand", "host_slots_for", "quota_for_tokens", "slots_for"]


def alone_slots(group: LayerGroup, tokens_per_block: int, demand: SizingDemand) -> int:
    """Slots of ``group`` with which one sequence alone takes a full context chunk."""
    if group.life_cycle.is_state:
        return 1 + demand.snapshots_per_sequence
    append = demand.widest_step_tokens
    if group.life_cycle.window is None:
        return ceil_div(append, tokens_per_block) + 1
    return group.life_cycle.most_live_blocks(append, tokens_per_block)


def floor_counts(table: GroupTable, demand: SizingDemand) -> tuple[int, ...]:
    """Slots per layer group below which no pool may fall: a chunk, every constraint, dummies.

    For states it is every live state beside the dummies and one lineage's snapshots, however long
    sequences are.
    """
    steps = [step.slots(table) for step in demand.constraints]
    floors: list[int] = []
    for group in table.layer_groups:
        needs = [alone_slots(group, table.tokens_per_block, demand)]
        if group.life_cycle.is_state:
            needs.append(demand.sequences + demand.snapshots_per_sequence)
        needs += [step[group.id] for step in steps]
        floors.append(max(needs) + demand.dummy_slots(group, table.tokens_per_block))
    return tuple(floors)


def counts_for_blocks(table: GroupTable, blocks: int, demand: SizingDemand) -> tuple[int, ...]:
    """Slots per layer group when the full-attention groups hold ``blocks`` blocks."""
    floors = floor_counts(table, demand)
    return tuple(
        max(floor, _wanted(table, group, blocks, demand))
        for floor, group in zip(floors, table.layer_groups, strict=True)
    )


def _wanted(table: GroupTable, group: LayerGroup, blocks: int, demand: SizingDemand) -> int:
    """Slots of one group for ``blocks`` blocks of tokens, before floors."""
    if group.life_cycle.is_full:
        return blocks
    tokens = blocks * table.tokens_per_block
    typical = ceil_div(tokens, demand.typical_sequence_tokens)
    sequences = max(demand.sequences, typical)
    dummies = demand.dummy_slots(group, table.tokens_per_block)
    if group.life_cycle.is_state:
        interval = demand.snapshot_interval_tokens
        regular = 0 if interval is None else tokens // interval
        return sequences * (1 + demand.snapshots_per_sequence) + dummies + regular
    live = group.life_cycle.most_live_blocks(demand.decode_tokens, table.tokens_per_block)
    chunk = ceil_div(demand.chunk_tokens, table.tokens_per_block)
    needed = ceil_div((sequences * live + chunk) * 100, demand.usable_percent)
    return min(blocks, needed + dummies)


def slots_for(table: GroupTable, quota_bytes: int, demand: SizingDemand) -> tuple[int, ...]:
    """The most slots per pool group within the quota; ValueError when the floors exceed it."""
    ratios = ratios_of(table, demand)
    floors = least_counts(table, demand)
    require_floors(table, floors, quota_bytes, demand)
    if ratios is not None:
        return table.pool_slots(counts_for_ratios(table, quota_bytes, ratios, floors))
    low, high = 0, _most_blocks(table, quota_bytes, demand)
    while low < high:
        middle = (low + high + 1) // 2
        if table.bytes_of(counts_for_blocks(table, middle, demand)) <= quota_bytes:
            low = middle
        else:
            high = middle - 1
    return table.pool_slots(counts_for_blocks(table, low, demand))


def least_counts(table: GroupTable, demand: SizingDemand) -> tuple[int, ...]:
    """Slots per layer group of the smallest pools that :func:`slots_for` makes."""
    if ratios_of(table, demand) is not None:
        return floor_counts(table, demand)
    return counts_for_blocks(table, 0, demand)


def ratios_of(table: GroupTable, demand: SizingDemand) -> tuple[float, ...] | None:
    """Shares per layer group when the demand gives them, else None."""
    if demand.pool_ratios is not None:
        return insert_draft_shares(table, demand.pool_ratios).ratios
    if demand.typical_step is not None:
        return step_ratios(table, demand.typical_step)
    return None


def require_floors(
    table: GroupTable, counts: Sequence[int], quota_bytes: int, demand: SizingDemand
) -> None:
    """Raise ValueError when slots per layer group ``counts`` take more than the quota."""
    needed = table.bytes_of(counts)
    if needed > quota_bytes:
        states = sum(
            count * group.bytes_per_slot
            for count, group in zip(counts, table.layer_groups, strict=True)
            if group.life_cycle.is_state
        )
        held = f" and {demand.sequences} live states ({states} bytes)" if states else ""
        raise ValueError(
            f"a quota of {quota_bytes} bytes holds no full context chunk of {demand.chunk_tokens} "
            f"tokens{held}, which needs {needed} bytes; raise the cache bytes or lower the batch "
            "tokens" + (" and the resident sequences" if states else "")
        )


def _most_blocks(table: GroupTable, quota_bytes: int, demand: SizingDemand) -> int:
    """A bound on the blocks that any quota can give, windows and states included."""
    smallest = min(group.bytes_per_slot for group in table.pool_groups)
    per_slot = demand.typical_sequence_tokens // table.tokens_per_block + 1
    return (quota_bytes // smallest + 1) * per_slot


def quota_for_tokens(table: GroupTable, tokens: int, demand: SizingDemand) -> int:
    """The least bytes of pools that hold ``tokens`` tokens of history beside scratch and dummies.

    Ranks agree on the least of their token capacities and ask this for their quota. Raises
    ValueError for a demand with shares, whose pools do not follow from tokens.
    """
    if ratios_of(table, demand) is not None:
        raise ValueError("pools of given shares do not follow from tokens; give a quota")
    reserved = demand.scratch_and_dummy_tokens(table.tokens_per_block)
    blocks = ceil_div(tokens + reserved, table.tokens_per_block)
    return table.bytes_of(counts_for_blocks(table, blocks, demand))


def host_slots_for(
    table: GroupTable, quota_bytes: int, device_slots: Sequence[int]
) -> tuple[int, ...]:
    """Slots per pool group within a host quota, in the proportions of the device's slots.

    Each group gets at least one slot or none does: a prefix is useful only with all its groups.
    """
    if quota_bytes < 0:
        raise ValueError(f"a host quota must not be negative, got {quota_bytes}")
    most = max(device_slots)

    def scaled(parts: int) -> tuple[int, ...]:
        return tuple(ceil_div(slots * parts, most) for slots in device_slots)

    def size(parts: int) -> int:
        counts = zip(scaled(parts), table.pool_groups, strict=True)
        return sum(count * pool.bytes_per_slot for count, pool in counts)

    low, high = 0, quota_bytes // min(pool.bytes_per_slot for pool in table.pool_groups)
    while low < high:
        middle = (low + high + 1) // 2
        if size(middle) <= quota_bytes:
            low = middle
        else:
            high = middle - 1
    return scaled(low)


def sequence_capacity_blocks(table: GroupTable, slots: Sequence[int], demand: SizingDemand) -> int:
    """Blocks of the longest sequence that can live alone; sys.maxsize // tokens without full
    groups.
    """
    longest = sys.maxsize // table.tokens_per_block
    for count, pool in zip(slots, table.pool_groups, strict=True):
        groups = [table.layer_groups[group] for group in pool.layer_groups]
        full = sum(group.life_cycle.is_full for group in groups)
        bounded = sum(
            alone_slots(group, table.tokens_per_block, demand)
            for group in groups
            if not group.life_cycle.is_full
        )
        if full:
            longest = min(longest, max(0, (count - bounded) // full))
        elif count < bounded:
            return 0
    return longest
