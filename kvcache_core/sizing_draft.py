"""What a drafter takes of the quota: the share of its windowed pool, and what it keeps elsewhere.

A drafter that sees a window needs room for windows, not for tokens: as many as sequences may be
resident, and one context chunk, which must fit whole. A pool sized by one typical request would
hold a quarter of that and starve, or, for long requests, take a quarter of the cache for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvcache_core.arithmetic import ceil_div
from kvcache_core.groups import GroupTable, LayerGroup
from kvcache_core.sizing_demand import BatchStep


@dataclass(frozen=True, kw_only=True)
class DraftShareDemand:
    """``chunk_tokens`` None: no bound on a context step. ``sequences`` is
    :func:`~kvcache_core.sizing_demand.admissible_sequences`; ``usable_percent`` the occupancy up to
    which sequences are resumed.
    """

    quota_bytes: int
    chunk_tokens: int | None
    sequences: int
    usable_percent: int = 97
    pool_ratios: tuple[float, ...] | None = None
    average_sequence_tokens: int | None = None


class NoDraftShare(Enum):
    """Why the usual division of the quota stands."""

    SIZES_GIVEN = "pool ratios or an average sequence length are given"
    NO_CHUNK_BOUND = "context steps have no bound"
    NO_WINDOWED_DRAFT = "no windowed life cycle belongs to the drafter"
    SEVERAL_WINDOWED_DRAFTS = "the drafter has several windowed life cycles"
    SHARED_LIFE_CYCLE = "a windowed life cycle holds both target and draft layers"
    FLOOR_EXCEEDS_QUOTA = "one context chunk in every group does not fit the quota"


@dataclass(frozen=True, kw_only=True)
class WindowedDraftShare:
    """The drafter's share and the resulting one of each layer group; both of 1.

    ``floor`` is the step that must fit: one context chunk, nothing final yet.
    """

    layer_group: int
    slots: int
    share: float
    is_capped: bool
    """True when the equal-token share decided: no more tokens than the target can hold."""
    ratios: tuple[float, ...]
    floor: BatchStep

    def describe(self) -> str:
        """One line for the log."""
        rule = "equal tokens" if self.is_capped else f"{self.slots} slots of windows and a chunk"
        shares = ", ".join(f"{ratio:.4f}" for ratio in self.ratios)
        return (
            f"windowed draft layer group {self.layer_group} gets {self.share:.4f} of the cache "
            f"({rule}); shares [{shares}]"
        )


def windowed_draft_share(
    table: GroupTable, demand: DraftShareDemand
) -> WindowedDraftShare | NoDraftShare:
    """The share of the one windowed draft group, or why there is none.

        slots = (sequences * blocks(window) + ceil(chunk / t)) / usable
        share = min(slots * b_draft / quota, b_draft / sum of b)      b: bytes of a block

    The rest goes to the other groups by their bytes per token.
    """
    group = _windowed_draft_group(table, demand)
    if isinstance(group, NoDraftShare):
        return group
    if demand.chunk_tokens is None:
        return NoDraftShare.NO_CHUNK_BOUND
    floor = BatchStep(((demand.chunk_tokens, 0),))
    if table.bytes_of([max(1, count) for count in floor.slots(table)]) > demand.quota_bytes:
        return NoDraftShare.FLOOR_EXCEEDS_QUOTA
    window_blocks = group.life_cycle.most_live_blocks(1, table.tokens_per_block)
    needed = demand.sequences * window_blocks
    needed += ceil_div(demand.chunk_tokens, table.tokens_per_block)
    slots = ceil_div(needed * 100, demand.usable_percent)
    total = sum(entry.bytes_per_slot for entry in table.layer_groups)
    wanted = slots * group.bytes_per_slot / demand.quota_bytes
    equal_tokens = group.bytes_per_slot / total
    share = min(wanted, equal_tokens)
    others = total - group.bytes_per_slot
    return WindowedDraftShare(
        layer_group=group.id,
        slots=slots,
        share=share,
        is_capped=equal_tokens <= wanted,
        ratios=tuple(
            share if entry is group else (1 - share) * entry.bytes_per_slot / others
            for entry in table.layer_groups
        ),
        floor=floor,
    )


def _windowed_draft_group(table: GroupTable, demand: DraftShareDemand) -> LayerGroup | NoDraftShare:
    if demand.pool_ratios is not None or demand.average_sequence_tokens is not None:
        return NoDraftShare.SIZES_GIVEN
    windowed = [group for group in table.layer_groups if group.life_cycle.window is not None]
    if any(group.draft_layer_ids and not group.is_draft for group in windowed):
        return NoDraftShare.SHARED_LIFE_CYCLE
    drafts = [group for group in windowed if group.is_draft]
    if len(drafts) > 1:
        return NoDraftShare.SEVERAL_WINDOWED_DRAFTS
    if not drafts or not table.target_groups:
        return NoDraftShare.NO_WINDOWED_DRAFT
    return drafts[0]


def context_only_reserve(resident_bytes: int, shared_bytes: int, cache_percent: float) -> int:
    """Bytes taken from the KV quota for a drafter that only computes prompt KV here.

    ``resident_bytes`` of device tensors, of which ``shared_bytes`` are storages that the target
    holds anyway, each counted once by the caller. ``cache_percent`` of free memory goes to the
    cache; what is left of it pays for its part of the drafter already, so the reserve is the rest:
    ``(1 - cache_percent / 100)`` of the drafter's own bytes, rounded up.
    """
    if not 0 <= shared_bytes <= resident_bytes:
        raise ValueError(
            f"expected 0 <= shared_bytes <= resident_bytes, got {shared_bytes} of {resident_bytes}"
        )
    if not 0 < cache_percent <= 100:
        raise ValueError(f"cache_percent must be in (0, 100], got {cache_percent}")
    own = resident_bytes - shared_bytes
    return own - math.floor(own * cache_percent / 100)
