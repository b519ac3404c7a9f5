"""Shares of a quota per layer group: given, derived from a typical step, or with a drafter's added.

Shares are bytes, not slots, and sum to 1. A group that its share would leave below its floor gets
the floor, and the others share the rest as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.groups import GroupTable, LayerGroup
from kvcache_core.sizing_demand import BatchStep


@dataclass(frozen=True, kw_only=True)
class InsertedShares:
    """Shares per layer group, and how the drafter's came in. The caller logs it once."""

    ratios: tuple[float, ...]
    target_ratios: tuple[float, ...]
    target_scale: float
    """What target shares were multiplied with; 1 when nothing was inserted."""
    draft_groups: tuple[int, ...]
    """Layer groups whose shares were inserted."""
    bytes_per_block: tuple[int, ...]
    """Of each layer group; of a state for recurrent ones."""

    def describe(self) -> str:
        """One line for the log."""
        if not self.draft_groups:
            return f"pool ratios {_shown(self.ratios)} used as given"
        shares = [self.ratios[group] for group in self.draft_groups]
        return (
            f"draft share {_shown(shares)} inserted for layer groups {list(self.draft_groups)}: "
            f"target ratios {_shown(self.target_ratios)} x {self.target_scale:.4f} -> "
            f"{_shown(self.ratios)}; bytes per block {list(self.bytes_per_block)}"
        )


def _shown(ratios: Sequence[float]) -> str:
    return "[" + ", ".join(f"{ratio:.4f}" for ratio in ratios) + "]"


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights as shares of 1. Raises ValueError for weights that are none."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"pool ratios must be positive numbers, got {list(weights)}")
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def step_ratios(table: GroupTable, step: BatchStep) -> tuple[float, ...]:
    """Shares by the bytes that a typical step holds in each layer group; at least one slot each."""
    return normalised(
        [
            max(count, 1) * group.bytes_per_slot
            for count, group in zip(step.slots(table), table.layer_groups, strict=True)
        ]
    )


def insert_draft_shares(table: GroupTable, ratios: Sequence[float]) -> InsertedShares:
    """Complete target shares by the drafter's; one share a layer group is used as given.

    A draft group gets bytes for as many tokens as the target's attention groups hold, and the
    target's shares are scaled down to make room: ``[1/3, 2/3]`` with a drafter of a sixth of the
    second group's bytes becomes ``[0.3, 0.6, 0.1]``. Raises ValueError for another number.
    """
    groups, targets = table.layer_groups, table.target_groups
    shares = normalised(ratios)
    sizes = tuple(group.bytes_per_slot for group in groups)
    if len(shares) == len(groups):
        return InsertedShares(
            ratios=shares,
            target_ratios=tuple(shares[group.id] for group in targets),
            target_scale=1.0,
            draft_groups=(),
            bytes_per_block=sizes,
        )
    if len(shares) != len(targets):
        raise ValueError(
            f"expected {len(groups)} pool ratios, one a layer group, or {len(targets)} for the "
            f"target's, got {len(shares)}"
        )
    by_group = {group.id: share for group, share in zip(targets, shares, strict=True)}
    tokens = _token_weight(targets, by_group)
    weights = {group.id: tokens * group.bytes_per_slot for group in table.draft_groups}
    scale = 1 / (1 + sum(weights.values()))
    merged = {**by_group, **weights}
    return InsertedShares(
        ratios=tuple(merged[group.id] * scale for group in groups),
        target_ratios=shares,
        target_scale=scale,
        draft_groups=tuple(weights),
        bytes_per_block=sizes,
    )


def _token_weight(targets: Sequence[LayerGroup], shares: dict[int, float]) -> float:
    """Share per byte of block of the target's full attention, else of all its attention."""
    full = [group for group in targets if group.life_cycle.is_full]
    counted = full or [group for group in targets if not group.life_cycle.is_state]
    if not counted:
        raise ValueError(
            "the target has no attention to measure a drafter's share by; give one pool ratio a "
            "layer group"
        )
    return sum(shares[group.id] for group in counted) / sum(
        group.bytes_per_slot for group in counted
    )


def counts_for_ratios(
    table: GroupTable, quota_bytes: int, ratios: Sequence[float], floors: Sequence[int]
) -> tuple[int, ...]:
    """Slots per layer group: each its share of the quota, none below its floor.

    The floors must fit the quota. The sum of bytes stays within it.
    """
    counts = dict(enumerate(floors))
    free = {group.id for group in table.layer_groups}
    while free:
        held = sum(
            counts[group.id] * group.bytes_per_slot
            for group in table.layer_groups
            if group.id not in free
        )
        total = sum(ratios[group] for group in free)
        wanted = {
            group.id: int((quota_bytes - held) * ratios[group.id] / total) // group.bytes_per_slot
            for group in table.layer_groups
            if group.id in free
        }
        short = {group for group in free if wanted[group] < floors[group]}
        if not short:
            counts.update(wanted)
            break
        free -= short
    return tuple(counts[group.id] for group in table.layer_groups)
