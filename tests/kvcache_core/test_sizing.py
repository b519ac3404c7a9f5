"""From a byte quota to slots: floors, windows, states, scratch, costs, estimates, host tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvcache_core.costs import cost_components
from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing_demand import (
    BatchStep,
    BlockAlignment,
    SizingDemand,
    admissible_sequences,
    append_width,
    capacity_of_step,
)
from kvcache_core.spec import KVCacheLayerSpec
from tests.kvcache_core.samples import (
    BF16,
    DRAFT,
    FP8,
    GEMMA,
    GIB,
    LAYOUTS,
    OPTIONAL,
    PRIVATE,
    TARGET,
    Pools,
    attention,
    derive,
    draft,
    index_keys,
    packed,
    states,
)
from tests.kvcache_core.strategies import BLOCK, demands, spec_lists


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_stay_within_the_quota_and_above_the_floors(name: str) -> None:
    plan = derive(*LAYOUTS[name])
    demand = SizingDemand(chunk_tokens=512, resident_sequences=4, typical_sequence_tokens=1024)
    for quota in (300_000, 10_000_000, 100_000_000):
        try:
            slots = plan.slots_for(quota, demand)
        except ValueError as error:
            assert "raise the cache bytes" in str(error)  # noqa: PT017
            assert quota == 300_000
            continue
        used = plan.pool_bytes(slots)
        assert 0.9 * quota < used <= quota
        assert plan.sequence_capacity_tokens(slots, demand) >= 512


@settings(max_examples=60, deadline=None)
@given(specs=spec_lists(), demand=demands, quota=st.integers(10_000, 3_000_000))
def test_estimate_equals_construction(
    specs: list[KVCacheLayerSpec], demand: SizingDemand, quota: int
) -> None:
    """Whatever the specs: the estimate's slots and bytes are those of pools really allocated, every
    step that was asked for fits, and one byte less than a quota for T tokens does not hold T.
    """
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    try:
        slots = plan.slots_for(quota, demand)
    except ValueError:
        least = plan.quota_for_tokens(1, demand)
        assert least > quota
        quota = least
        slots = plan.slots_for(quota, demand)
    estimate = plan.estimate(quota, demand)
    pools = Pools(plan, slots)
    allocated = sum(pool.nbytes for group in pools.pools for pool in group)
    assert estimate.slots == slots
    assert estimate.bytes == allocated == plan.pool_bytes(slots) <= quota
    assert all(have >= least for have, least in zip(slots, estimate.floor_slots, strict=True))
    for step in (
        BatchStep(((demand.chunk_tokens + demand.scratch_tokens, 0),)),
        *demand.constraints,
    ):
        needed = plan.step_slots(step)
        assert all(need <= have for need, have in zip(needed, slots, strict=True))
    if not estimate.tokens:
        return  # all of it is scratch and dummies
    least = plan.quota_for_tokens(estimate.tokens, demand)
    assert least <= quota
    assert plan.estimate(least, demand).tokens >= estimate.tokens
    try:
        assert plan.estimate(least - 1, demand).tokens < estimate.tokens
    except ValueError as error:
        assert "raise the cache bytes" in str(error)  # noqa: PT017


def test_windowed_pool_is_sized_for_windows_not_for_tokens() -> None:
    plan = derive(*GEMMA)
    demand = SizingDemand(chunk_tokens=512, resident_sequences=16)
    windowed, full = plan.slots_for(1 << 30, demand)
    live = plan.layer_groups[0].life_cycle.most_live_blocks(1, 64)
    assert windowed >= 16 * live + 8
    assert full > 3 * windowed
    assert plan.sequence_capacity_tokens((windowed, full), demand) == full * 64


def test_k12_cost_classes_keep_sinks_policies_and_owners_apart() -> None:
    """Five layers of one window: four life cycles, and a class more for the drafter."""
    plan = derive(
        attention(0, window=100),
        attention(1, window=100, sink_tokens=70),
        attention(2, window=100, policy=OPTIONAL),
        attention(3, window=100),
        draft(4, window=100),
    )
    classes = plan.cost_classes
    assert [(entry.layer_ids, entry.owner, entry.layer_group) for entry in classes] == [
        ((0, 3), TARGET, 0),
        ((4,), DRAFT, 0),
        ((1,), TARGET, 1),
        ((2,), TARGET, 2),
    ]
    block = 2 * 64 * 64 * 2
    # 99 tokens behind the newest straddle 3 blocks; 70 sink tokens are 2 more
    assert [entry.fixed_bytes(1) for entry in classes] == [
        2 * 3 * block,
        3 * block,
        5 * block,
        3 * block,
    ]


def test_b07_sinks_and_policies_count_in_the_costs() -> None:
    plain = cost_components(derive(attention(0, window=100)).cost_classes)
    sinks = cost_components(derive(attention(0, window=100, sink_tokens=64)).cost_classes)
    assert sinks.window_bytes - plain.window_bytes == 64 * 256
    both = derive(attention(0), attention(1, policy=PRIVATE))
    assert len(both.cost_classes) == len(both.layer_groups) == 2


def test_k12_each_windowed_draft_layer_is_rounded_by_itself() -> None:
    """Windows of 100 and 130 tokens, a block appended: 3 and 4 blocks, not the 4 of their mean."""
    plan = derive(
        attention(0, heads=4),
        draft(1, FP8, 2, window=100, policy=OPTIONAL),
        draft(2, FP8, 2, window=130, policy=OPTIONAL),
        draft(3, FP8, 1, window=130, policy=OPTIONAL),
    )
    drafts = [entry for entry in plan.cost_classes if entry.owner is DRAFT]
    wide, narrow = 2 * 2 * 64 * 64, 2 * 64 * 64
    assert cost_components(drafts).window_bytes == 3 * wide + 4 * wide + 4 * narrow
    assert cost_components(drafts).token_bytes == 0
    assert cost_components(drafts).windowed_token_bytes == (2 * wide + narrow) // 64
    assert cost_components(drafts, 65).window_bytes == 4 * wide + 5 * wide + 5 * narrow


def test_k12_per_token_part_is_the_sum_of_the_layers() -> None:
    """Equal to what the specs say for an equivalent uniform configuration, scales included."""
    for specs in (
        [attention(layer, FP8, 8, 128) for layer in range(4)],
        [packed(layer, 8, 128) for layer in range(4)],
        [attention(0, kv_factor=1, head_dim=576), draft(1, heads=2, policy=OPTIONAL)],
        [attention(0, extra_buffers=(index_keys(),)), packed(1), attention(2, FP8)],
    ):
        plan = derive(*specs)
        components = cost_components(plan.cost_classes)
        assert components.token_bytes == sum(spec.bytes_per_token for spec in specs)
        assert components.window_bytes == components.state_bytes == 0
    assert cost_components(derive(states(0)).cost_classes).state_bytes == 384


def test_k25_scratch_is_the_wider_of_extra_tokens_and_block() -> None:
    """A shifted block of K labels has K places, an unshifted one K + 1; K - 1 extra tokens."""
    assert BlockAlignment.SHIFTED.block_width(7) == 7
    assert BlockAlignment.UNSHIFTED.block_width(7) == 8
    assert append_width(6, BlockAlignment.UNSHIFTED.block_width(7)) == 8
    assert append_width(6, BlockAlignment.SHIFTED.block_width(7)) == 7
    assert append_width(9, 8) == 9
    assert append_width(0, 0) == 0


@pytest.mark.parametrize("chunk", [511, 512, 513])
def test_k25_scratch_counts_at_every_allocation_site(chunk: int) -> None:
    """Context step and decode step, full and windowed: with pools at their floors, each fits."""
    scratch = append_width(6, 8)
    plan = derive(attention(0, heads=2), draft(1, window=129, policy=OPTIONAL))
    demand = SizingDemand(chunk_tokens=chunk, append_tokens=8, scratch_tokens=scratch)
    floors = plan.slots_for(plan.quota_for_tokens(1, demand), demand)
    bare = replace(demand, scratch_tokens=0)
    for history in range(0, 200):
        for written in (chunk, 8):
            step = BatchStep(((capacity_of_step(history, written, scratch), history),))
            windowed = plan.step_slots(step)[1]
            assert windowed <= floors[1], (history, written)
    first = BatchStep(((capacity_of_step(0, chunk, scratch), 0),))
    assert plan.step_slots(first)[0] <= floors[0]
    assert demand.widest_step_tokens == bare.widest_step_tokens + 8 == chunk + 8
    assert demand.decode_tokens == bare.decode_tokens + 8 == 16
    wide = replace(demand, chunk_tokens=4)
    assert wide.widest_step_tokens == 8 + 8


def test_b14_the_last_place_of_a_draft_block_has_a_page() -> None:
    """K = 4, prompt of 60 in blocks of 64: three extra tokens end in block 0, the block of five
    places in block 1. Its last slot was unpaged and overwrote the last token of the context.
    """
    plan = derive(attention(0), draft(1, policy=OPTIONAL))
    width = append_width(3, BlockAlignment.UNSHIFTED.block_width(4))
    for history, blocks in ((58, 1), (59, 1), (60, 2), (123, 2), (124, 3)):
        capacity = capacity_of_step(history, 0, width)
        assert plan.blocks(capacity) == blocks
        last_place = history + 4
        assert last_place // 64 < plan.blocks(capacity)
    assert plan.blocks(capacity_of_step(60, 0, 3)) == 1


def test_k26_scratch_of_a_batch_is_not_promised_as_tokens() -> None:
    """32 sequences x 9 tokens, in target and draft layers alike, and never less than one token."""
    plan = derive(attention(0, heads=4), attention(1, heads=4), draft(2, heads=2, policy=OPTIONAL))
    slope = 2 * 1024 + 512
    none = plan.estimate(GIB, SizingDemand(resident_sequences=32))
    some = plan.estimate(GIB, SizingDemand(resident_sequences=32, scratch_tokens=8))
    assert (none.scratch_tokens, some.scratch_tokens) == (32, 32 * 9)
    assert some.token_bytes == plan.bytes_per_token == slope
    assert some.scratch_bytes == 32 * 9 * slope
    assert none.tokens - some.tokens == 32 * 8
    assert some.tokens == some.slots[0] * 64 - 32 * 9


def test_b25_preemption_headroom_takes_scratch_too() -> None:
    """(batch + headroom) x scratch x slope of all attention layers, the drafter's as well."""
    plan = derive(attention(0, heads=4), draft(1, heads=2, policy=OPTIONAL), states(2))
    demand = SizingDemand(resident_sequences=32, scratch_tokens=8, preemption_headroom=5)
    estimate = plan.estimate(GIB, demand)
    assert estimate.scratch_tokens == (32 + 5) * 9
    assert estimate.scratch_bytes == (32 + 5) * 9 * (1024 + 512)
    assert estimate.floor_slots[2] == 32 + 5 + 1
    windowed = derive(attention(0, heads=4), draft(1, window=100, policy=OPTIONAL))
    sizes = [
        windowed.slots_for(
            GIB, replace(demand, preemption_headroom=n, typical_sequence_tokens=10**9)
        )
        for n in (0, 5)
    ]
    assert sizes[1][1] - sizes[0][1] == 5 * windowed.layer_groups[1].life_cycle.most_live_blocks(
        9, 64
    )


def test_k32_states_are_counted_by_sequences_and_snapshots() -> None:
    """8 residents, 2 in headroom, 3 dummies, 2 snapshots each; regular ones every 4096 tokens."""
    plan = derive(attention(0, heads=4), states(1))
    demand = SizingDemand(
        resident_sequences=8,
        preemption_headroom=2,
        dummy_sequences=3,
        snapshots_per_sequence=2,
        typical_sequence_tokens=10**9,
    )
    assert plan.slots_for(1 << 26, demand)[1] == plan.slots_for(1 << 28, demand)[1] == 10 * 3 + 3
    regular = replace(demand, snapshot_interval_tokens=4096)
    blocks, slots = plan.slots_for(1 << 28, regular)
    assert slots == 33 + blocks * 64 // 4096
    assert slots > 60
    typical = replace(demand, typical_sequence_tokens=4096)
    blocks, slots = plan.slots_for(1 << 28, typical)
    assert slots == -(-blocks * 64 // 4096) * 3 + 3


def test_k32_the_floor_of_states_does_not_know_lengths() -> None:
    """All live states and dummies or nothing, in one sentence; also when shares are given."""
    plan = derive(attention(0), states(1, elements=100_000))
    demand = SizingDemand(resident_sequences=8, dummy_sequences=2, snapshots_per_sequence=0)
    state = 2 * 100_000 * 4
    for length in (1, 2048, 10**9):
        changed = replace(demand, typical_sequence_tokens=length)
        with pytest.raises(ValueError, match=r"8 live states .*resident sequences"):
            plan.slots_for(10 * state, changed)
        assert plan.slots_for(11 * state, changed)[1] >= 10
    shares = replace(demand, pool_ratios=(0.99, 0.01))
    with pytest.raises(ValueError, match="8 live states"):
        plan.slots_for(10 * state, shares)
    assert plan.slots_for(20 * state, shares)[1] == 10


def test_dummies_hold_one_steps_pages_in_every_group() -> None:
    plan = derive(attention(0, heads=4), attention(1, window=100), states(2))
    demand = SizingDemand(resident_sequences=4, append_tokens=60, scratch_tokens=8)
    with_dummy = replace(demand, dummy_sequences=1)
    floors = [plan.estimate(GIB, entry).floor_slots for entry in (demand, with_dummy)]
    assert [b - a for a, b in zip(*floors, strict=True)] == [2, 2, 1]
    tokens = [
        plan.estimate(plan.quota_for_tokens(5000, entry), entry) for entry in (demand, with_dummy)
    ]
    assert tokens[1].slots[0] - tokens[0].slots[0] == 2


@pytest.mark.parametrize("bases", [7, 1000])
def test_host_slots_keep_the_devices_proportions(bases: int) -> None:
    """Never more than the quota, at least one slot of each group or none, larger than the device
    where the quota is.
    """
    plan = derive(attention(0, heads=4), attention(1, window=100), states(2))
    device = (bases, 3 * bases, 2)
    total = plan.pool_bytes(device)
    for quota in (total // 2, total, 5 * total):
        host = plan.host_slots_for(quota, device)
        assert plan.pool_bytes(host) <= quota
        for have, slots in zip(host, device, strict=True):
            assert have >= 1
            assert have == pytest.approx(slots * quota / total, abs=1.5)
    one = plan.pool_bytes((1, 1, 1))
    assert plan.host_slots_for(one - 1, device) == plan.host_slots_for(0, device) == (0, 0, 0)
    assert plan.host_slots_for(one, device) == (1, 1, 1)
    with pytest.raises(ValueError, match="must not be negative"):
        plan.host_slots_for(-1, device)


def test_b34_profiling_counts_every_group_of_the_plan() -> None:
    """Full and windowed target groups share a pool group with the drafter's: a warm-up batch of 8
    prompts needs the slots of all three, where counting the target as one group gave a third.
    """
    plan = derive(attention(0), attention(1, window=100), draft(2, policy=OPTIONAL), states(3))
    assert [group.layer_groups for group in plan.pool_groups] == [(0, 1, 2), (3,)]
    warm_up = BatchStep(((2048, 0),) * 8)
    assert plan.step_slots(warm_up) == (8 * 3 * 32, 8)
    assert plan.step_slots(BatchStep(((2048, 2047),))) == (32 + 2 + 32, 1)
    quota = plan.pool_bytes(plan.step_slots(warm_up))
    demand = SizingDemand(constraints=(warm_up,), resident_sequences=8, snapshots_per_sequence=0)
    slots = plan.slots_for(quota + 1_000_000, demand)
    assert all(a >= b for a, b in zip(slots, plan.step_slots(warm_up), strict=True))


def test_demands_are_checked() -> None:
    for field in ("chunk_tokens", "resident_sequences", "append_tokens", "typical_sequence_tokens"):
        zero: dict[str, Any] = {field: 0}
        with pytest.raises(ValueError, match=f"{field} must be at least 1"):
            SizingDemand(**zero)
    for field in ("scratch_tokens", "preemption_headroom", "dummy_sequences"):
        negative: dict[str, Any] = {field: -1}
        with pytest.raises(ValueError, match=f"{field} must not be negative"):
            SizingDemand(**negative)
    with pytest.raises(ValueError, match="usable_percent"):
        SizingDemand(usable_percent=0)
    with pytest.raises(ValueError, match="snapshot_interval_tokens"):
        SizingDemand(snapshot_interval_tokens=0)


def test_ranks_agree_on_the_least_capacity() -> None:
    """Stages of 3 and 4 layers with one quota: the smaller capacity, then a quota for it each."""
    stages = [derive(*(attention(n, heads=2) for n in range(count))) for count in (3, 4)]
    least = min(stage.estimate(GIB).tokens for stage in stages)
    for stage in stages:
        quota = stage.quota_for_tokens(least)
        assert quota <= GIB
        assert stage.estimate(quota).tokens == pytest.approx(least, abs=64)


def test_admissible_sequences_count_stages_and_waiting_ones() -> None:
    assert admissible_sequences(8) == 8
    assert admissible_sequences(8, pipeline_stages=2, admissions=2) == 32
    assert BF16.bits == 16
