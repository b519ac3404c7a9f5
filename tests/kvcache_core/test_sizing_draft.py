"""The share of a windowed drafter's pool, and the reserve of a drafter without decode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvcache_core.sizing_demand import TYPICAL_STEP, SizingDemand, admissible_sequences
from kvcache_core.sizing_draft import (
    DraftShareDemand,
    NoDraftShare,
    WindowedDraftShare,
    context_only_reserve,
    windowed_draft_share,
)
from kvcache_core.sizing_ratios import step_ratios
from kvcache_core.spec import KVCacheLayerSpec
from tests.kvcache_core.samples import FP8, GIB, OPTIONAL, attention, derive, draft, states

TARGET_LAYERS = [attention(layer, heads=4, head_dim=128) for layer in range(30)]
DRAFTER = draft(30, heads=4, head_dim=128, window=2048, policy=OPTIONAL)
PLAN = derive(*TARGET_LAYERS, DRAFTER, longest=131072)
LAYER_BLOCK = 2 * 4 * 128 * 64 * 2
DEMAND = DraftShareDemand(quota_bytes=16 * GIB, chunk_tokens=8192, sequences=8)


def share_of(demand: DraftShareDemand) -> WindowedDraftShare:
    share = windowed_draft_share(PLAN.table, demand)
    assert isinstance(share, WindowedDraftShare)
    return share


@pytest.mark.parametrize("admissions", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_k23_windowed_draft_share(stages: int, admissions: int) -> None:
    """Aggregated and disaggregated, one and two stages. A window of 2048 straddles 33 blocks of 64;
    a chunk of 8192 tokens is 128 blocks; sequences are resumed up to 97 percent.
    """
    sequences = admissible_sequences(8, pipeline_stages=stages, admissions=admissions)
    share = share_of(replace(DEMAND, sequences=sequences))
    slots = math.ceil((sequences * 33 + 128) / 0.97)
    assert share.slots == slots
    assert share.share == pytest.approx(slots * LAYER_BLOCK / (16 * GIB))
    assert not share.is_capped
    assert share.ratios == pytest.approx((1 - share.share, share.share))
    assert share.floor.sequences == ((8192, 0),)
    assert share.layer_group == 1


def test_k23_the_drafter_never_holds_more_tokens_than_the_target() -> None:
    """In 1 GiB its windows would take 0.049; one layer of 31 is 0.032: as many blocks each."""
    share = share_of(replace(DEMAND, quota_bytes=GIB))
    assert share.is_capped
    assert share.share == pytest.approx(1 / 31)
    demand = SizingDemand(chunk_tokens=8192, pool_ratios=share.ratios)
    slots = PLAN.slots_for(GIB, demand)
    assert slots[0] == pytest.approx(slots[1], abs=1)
    assert "0.0323 of the cache (equal tokens)" in share.describe()


def test_k23_remaining_bytes_go_by_bytes_per_token() -> None:
    plan = derive(
        *TARGET_LAYERS[:3], attention(3, FP8, 2, window=9000), draft(4, window=100), longest=10**5
    )
    share = windowed_draft_share(plan.table, replace(DEMAND, chunk_tokens=512))
    assert isinstance(share, WindowedDraftShare)
    full, windowed, _ = (group.bytes_per_slot for group in plan.layer_groups)
    assert sum(share.ratios) == pytest.approx(1)
    assert share.ratios[0] / share.ratios[1] == pytest.approx(full / windowed)
    assert "windows and a chunk" in share.describe()


NO_WINDOW = [attention(0), draft(1, policy=OPTIONAL)]
TWO_WINDOWS = [attention(0), draft(1, window=100), draft(2, window=200)]
SHARED_WINDOW = [
    attention(0),
    attention(1, window=100, sink_tokens=4),
    draft(2, window=100, sink_tokens=4),
]
DRAFT_ALONE = [draft(0, window=100)]
FITS = [attention(0), draft(1, window=100)]


@pytest.mark.parametrize(
    ("specs", "changes", "reason"),
    [
        (FITS, {"chunk_tokens": None}, NoDraftShare.NO_CHUNK_BOUND),
        (NO_WINDOW, {}, NoDraftShare.NO_WINDOWED_DRAFT),
        (DRAFT_ALONE, {}, NoDraftShare.NO_WINDOWED_DRAFT),
        ([attention(0), states(1)], {}, NoDraftShare.NO_WINDOWED_DRAFT),
        (TWO_WINDOWS, {}, NoDraftShare.SEVERAL_WINDOWED_DRAFTS),
        (SHARED_WINDOW, {}, NoDraftShare.SHARED_LIFE_CYCLE),
        (FITS, {"pool_ratios": (0.5, 0.5)}, NoDraftShare.SIZES_GIVEN),
        (FITS, {"average_sequence_tokens": 4096}, NoDraftShare.SIZES_GIVEN),
        (FITS, {"quota_bytes": 2 * 128 * 16384 - 1}, NoDraftShare.FLOOR_EXCEEDS_QUOTA),
    ],
)
def test_k23_there_may_be_no_share(
    specs: list[KVCacheLayerSpec], changes: dict[str, object], reason: NoDraftShare
) -> None:
    """The usual division stands, and the value says why."""
    demand = replace(DEMAND, **changes)  # type: ignore[arg-type]
    assert windowed_draft_share(derive(*specs).table, demand) is reason


def test_k23_a_floor_that_just_fits_gives_a_share() -> None:
    demand = replace(DEMAND, quota_bytes=2 * 128 * 16384)
    assert isinstance(windowed_draft_share(derive(*FITS).table, demand), WindowedDraftShare)


def test_k23_keyed_by_life_cycle_not_by_window() -> None:
    """Sinks keep target and draft of one window apart, and then there is a share."""
    plan = derive(attention(0), attention(1, window=100, sink_tokens=4), draft(2, window=100))
    share = windowed_draft_share(plan.table, DEMAND)
    assert isinstance(share, WindowedDraftShare)
    assert share.layer_group == 2
    normalised = derive(attention(0), draft(1, window=4096), longest=4096)
    assert windowed_draft_share(normalised.table, DEMAND) is NoDraftShare.NO_WINDOWED_DRAFT


@pytest.mark.parametrize("sequences", [1, 8, 64, 400])
def test_k23_sizes_without_shares_hold_the_same_windows(sequences: int) -> None:
    """What slots_for derives from counts is this rule already: the same slots for the drafter."""
    demand = SizingDemand(
        chunk_tokens=8192,
        resident_sequences=sequences,
        usable_percent=97,
        typical_sequence_tokens=10**9,
    )
    share = share_of(replace(DEMAND, sequences=sequences))
    target, drafter = PLAN.slots_for(16 * GIB, demand)
    assert drafter == min(share.slots, target)


def test_b58_a_typical_request_is_no_measure_for_a_windowed_drafter() -> None:
    """64 sequences with windows of 512 need 726 blocks. One request of 2048 tokens as the measure
    gives 73 of 1 GiB: not even one context chunk of 8192 tokens, which is 128.
    """
    plan = derive(*TARGET_LAYERS, replace(DRAFTER, window=512), longest=131072)
    _, typical = step_ratios(plan.table, TYPICAL_STEP)
    assert int(typical * GIB // LAYER_BLOCK) == 73
    demand = replace(DEMAND, quota_bytes=GIB, sequences=64)
    share = windowed_draft_share(plan.table, demand)
    assert isinstance(share, WindowedDraftShare)
    assert share.slots == 726
    slots = plan.slots_for(GIB, SizingDemand(chunk_tokens=8192, pool_ratios=share.ratios))
    assert slots[1] == 264 > 3 * 73
    assert all(have >= 128 for have in slots)
    # even with the wrong measure the floor holds: a chunk beside a window
    floored = plan.slots_for(GIB, SizingDemand(chunk_tokens=8192, typical_step=TYPICAL_STEP))
    assert floored[1] >= 128 + 8


def test_b58_the_drafter_does_not_take_a_quarter_of_the_cache() -> None:
    """One large draft layer and few target layers: the share follows windows, not requests."""
    plan = derive(*TARGET_LAYERS[:3], replace(DRAFTER, layer_id=3), longest=131072)
    _, typical = step_ratios(plan.table, TYPICAL_STEP)
    assert typical == pytest.approx(0.25)
    share = windowed_draft_share(plan.table, DEMAND)
    assert isinstance(share, WindowedDraftShare)
    assert share.share < 0.004
    slots = plan.slots_for(16 * GIB, SizingDemand(chunk_tokens=8192, pool_ratios=share.ratios))
    assert slots[1] == 405 - 1 or slots[1] == 405
    assert slots[0] > 40_000


def test_k30_reserve_of_a_context_only_drafter() -> None:
    """1000 MB, of which 200 are the target's embedding; nine tenths of free memory are the cache's,
    and these have shrunk by the drafter already.
    """
    assert context_only_reserve(1_000_000_000, 200_000_000, 90) == 80_000_000
    assert context_only_reserve(1_000_000_001, 200_000_000, 90) == 80_000_001
    assert context_only_reserve(1000, 0, 62.5) == 375


@pytest.mark.parametrize(
    ("resident", "shared", "percent"), [(0, 0, 90), (500, 500, 90), (500, 100, 100)]
)
def test_k30_there_may_be_nothing_to_reserve(resident: int, shared: int, percent: float) -> None:
    assert context_only_reserve(resident, shared, percent) == 0


def test_k30_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="shared_bytes <= resident_bytes"):
        context_only_reserve(100, 101, 90)
    for percent in (0, 100.5, -1):
        with pytest.raises(ValueError, match="cache_percent"):
            context_only_reserve(100, 0, percent)
