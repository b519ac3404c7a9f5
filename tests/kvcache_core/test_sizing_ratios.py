"""Shares of a quota: given, from a typical step, or completed by the drafter's."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing_demand import (
    TYPICAL_STEP,
    BatchStep,
    SizingDemand,
)
from kvcache_core.sizing_ratios import insert_draft_shares, step_ratios
from kvcache_core.spec import KVCacheLayerSpec
from tests.kvcache_core.samples import (
    GIB,
    OPTIONAL,
    attention,
    derive,
    draft,
    states,
)
from tests.kvcache_core.strategies import BLOCK, demands, spec_lists


@settings(max_examples=60, deadline=None)
@given(
    specs=spec_lists(),
    demand=demands,
    quota=st.integers(100_000, 3_000_000),
    weights=st.lists(st.floats(0.01, 1), min_size=12, max_size=12),
)
def test_given_shares_keep_quota_and_floors(
    specs: list[KVCacheLayerSpec], demand: SizingDemand, quota: int, weights: list[float]
) -> None:
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    demand = replace(demand, pool_ratios=tuple(weights[: len(plan.layer_groups)]))
    try:
        estimate = plan.estimate(quota, demand)
    except ValueError as error:
        assert "raise the cache bytes" in str(error)  # noqa: PT017
        return
    assert estimate.bytes <= quota
    assert all(
        have >= need for have, need in zip(estimate.slots, estimate.floor_slots, strict=True)
    )
    assert estimate.bytes > quota - sum(group.bytes_per_slot for group in plan.layer_groups)


def test_constraints_are_least_slots() -> None:
    """Two prompts of 4096 tokens in one step must fit, and one state each."""
    plan = derive(attention(0), attention(1, heads=2, window=100), states(2))
    step = BatchStep(((4096, 0), (4096, 4095)))
    demand = SizingDemand(constraints=(step,), pool_ratios=(0.9, 0.05, 0.05))
    assert plan.step_slots(step) == (128, 64 + 2, 2)
    estimate = plan.estimate(40_000_000, demand)
    assert all(a >= b for a, b in zip(estimate.slots, (128, 66, 2), strict=True))
    assert estimate.floor_slots[:2] == (128, 66)
    with pytest.raises(ValueError, match="raise the cache bytes"):
        plan.slots_for(2_000_000, demand)
    with pytest.raises(ValueError, match="0 <= history <= capacity"):
        BatchStep(((5, 6),))


def test_typical_step_gives_the_shares() -> None:
    """One request of 2049 tokens: 33 blocks of full attention, 9 of a window of 512, one state."""
    plan = derive(attention(0, heads=2), attention(1, window=512), states(2, 100_000))
    sizes = [33 * 2 * 16384, 9 * 16384, 800_000]
    shares = step_ratios(plan.table, TYPICAL_STEP)
    assert shares == pytest.approx([size / sum(sizes) for size in sizes])
    demand = SizingDemand(typical_step=TYPICAL_STEP)
    slots = plan.slots_for(GIB, demand)
    for count, group, share in zip(slots, plan.pool_groups, shares, strict=True):
        assert count == pytest.approx(GIB * share / group.bytes_per_slot, rel=0.01)
    with pytest.raises(ValueError, match="not both"):
        SizingDemand(typical_step=TYPICAL_STEP, pool_ratios=(1.0,))
    with pytest.raises(ValueError, match="do not follow from tokens"):
        plan.quota_for_tokens(100, demand)


def test_k24_the_drafters_share_is_inserted_into_the_targets() -> None:
    """Recurrent target with shares 1 : 2; the drafter stores a sixth of the attention's bytes."""
    plan = derive(states(0), attention(1, heads=6), draft(2, policy=OPTIONAL))
    inserted = insert_draft_shares(plan.table, (1, 2))
    assert inserted.ratios == pytest.approx([0.3, 0.6, 0.1])
    assert inserted.target_ratios == pytest.approx([1 / 3, 2 / 3])
    assert inserted.target_scale == pytest.approx(0.9)
    assert inserted.draft_groups == (2,)
    assert inserted.bytes_per_block == (384, 6 * 16384, 16384)
    assert inserted.describe() == (
        "draft share [0.1000] inserted for layer groups [2]: target ratios [0.3333, 0.6667] x "
        "0.9000 -> [0.3000, 0.6000, 0.1000]; bytes per block [384, 98304, 16384]"
    )
    given_all = insert_draft_shares(plan.table, (0.5, 0.25, 0.25))
    assert given_all.ratios == (0.5, 0.25, 0.25)
    assert (given_all.target_scale, given_all.draft_groups) == (1.0, ())
    assert given_all.describe() == "pool ratios [0.5000, 0.2500, 0.2500] used as given"
    with pytest.raises(ValueError, match="expected 3 pool ratios, one a layer group, or 2 for the"):
        insert_draft_shares(plan.table, (1.0,))
    with pytest.raises(ValueError, match="positive numbers"):
        insert_draft_shares(plan.table, (1.0, 0.0))


def test_b40_inserted_shares_reach_the_pools() -> None:
    """[0.3, 0.6, 0.1] in bytes of real pools, and equal tokens of target and drafter."""
    plan = derive(states(0), attention(1, heads=6), draft(2, policy=OPTIONAL))
    slots = plan.slots_for(GIB, SizingDemand(pool_ratios=(1 / 3, 2 / 3)))
    sizes = [
        count * group.bytes_per_slot for count, group in zip(slots, plan.pool_groups, strict=True)
    ]
    assert [size / GIB for size in sizes] == pytest.approx([0.3, 0.6, 0.1], abs=1e-4)
    assert slots[1] == pytest.approx(slots[2], abs=1)


def test_k24_without_target_attention_there_is_no_measure() -> None:
    plan = derive(states(0), draft(1, policy=OPTIONAL))
    with pytest.raises(ValueError, match="give one pool ratio a layer group"):
        insert_draft_shares(plan.table, (1.0,))
    windowed = derive(attention(0, heads=3, window=100), draft(1, policy=OPTIONAL))
    assert insert_draft_shares(windowed.table, (1.0,)).ratios == pytest.approx([0.75, 0.25])


@given(specs=spec_lists(), weights=st.lists(st.floats(0.01, 9), min_size=12, max_size=12))
@settings(max_examples=40, deadline=None)
def test_k24_shares_sum_to_one(specs: list[KVCacheLayerSpec], weights: list[float]) -> None:
    """And the target's keep their proportions."""
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    targets = plan.table.target_groups
    if not any(not group.life_cycle.is_state for group in targets):
        return
    result = insert_draft_shares(plan.table, weights[: len(targets)])
    assert sum(result.ratios) == pytest.approx(1)
    scaled = [result.ratios[group.id] / result.target_scale for group in targets]
    assert scaled == pytest.approx(result.target_ratios)
