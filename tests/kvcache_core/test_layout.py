"""Grouping, coalescing, views, index spaces and sizes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvcache_core.index_space import IndexKind, IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing import SizingDemand
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
)
from tests.kvcache_core.support import DRAFT, LAYOUTS, TARGET, layer, plan_of, state_layer

GEMMA = [
    KVCacheLayerSpec(
        layer_id=index,
        owner=TARGET,
        dtype=ElementType.BFLOAT16,
        num_kv_heads=1,
        head_dim=256,
        window=None if index % 6 == 5 else 512,
    )
    for index in range(26)
]

layer_specs = st.builds(
    KVCacheLayerSpec,
    layer_id=st.just(0),
    owner=st.sampled_from([TARGET, DRAFT]),
    dtype=st.sampled_from([ElementType.BFLOAT16, ElementType.FLOAT8_E4M3, ElementType.FLOAT32]),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 64]),
    kv_factor=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 32, 100]),
    policy=st.sampled_from(list(ReusePolicy)),
    tokens_per_page=st.sampled_from([None, 4, 8]),
    scale_block_elements=st.sampled_from([None, 8]),
)


def numbered(specs: list[KVCacheLayerSpec]) -> list[KVCacheLayerSpec]:
    """The same specs with ids 0, 1, ..."""
    fields = [{**vars(spec), "layer_id": index} for index, spec in enumerate(specs)]
    return [KVCacheLayerSpec(**field) for field in fields]


@settings(max_examples=30, deadline=None)
@given(specs=st.lists(layer_specs, min_size=1, max_size=8), data=st.data())
def test_every_byte_belongs_to_one_buffer(
    specs: list[KVCacheLayerSpec], data: st.DataObject
) -> None:
    specs = numbered(specs)
    plan = LayoutPlan.derive(specs, tokens_per_block=16)
    shuffled = data.draw(st.permutations(specs))
    assert LayoutPlan.derive(shuffled, tokens_per_block=16) == plan
    slots = 5
    owners: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    for (layer_id, _), address in plan.addresses.items():
        pages = address.geometry.pages_per_block
        for slot in range(slots):
            for page in range(pages):
                start = address.byte_offset(slot, page)
                key = (address.layer_group, address.pool, slot)
                assert slot * address.slot_bytes <= start
                assert start + address.geometry.page_bytes <= (slot + 1) * address.slot_bytes
                assert start % 64 == 0
                taken = owners.setdefault(key, set())
                span = (start, start + address.geometry.page_stride_bytes)
                assert all(span[1] <= low or high <= span[0] for low, high in taken), layer_id
                taken.add(span)
    assert sorted(b.offset_bytes for v in plan.views for b in v.buffers) == sorted(
        address.offset_bytes for address in plan.addresses.values()
    )
    for view in plan.views:
        assert {plan.spec(b.layer_id).owner for b in view.buffers} == {view.owner}
        assert {b.geometry for b in view.buffers} == {view.geometry}


@settings(max_examples=30, deadline=None)
@given(specs=st.lists(layer_specs, min_size=1, max_size=6))
def test_index_spaces_go_there_and_back(specs: list[KVCacheLayerSpec]) -> None:
    plan = LayoutPlan.derive(numbered(specs), tokens_per_block=16)
    for address in plan.addresses.values():
        for kind in IndexKind:
            try:
                space = IndexSpace.of(address, kind)
            except ValueError:
                assert kind is not IndexKind.RAW_SLOT
                continue
            slots = np.array([0, 3, 6, 1], dtype=np.int32)
            indices = space.expand(slots)
            assert indices.dtype == np.int32
            assert [space.slot_of(int(i)) for i in indices[:: space.pages_per_block]] == [
                0,
                3,
                6,
                1,
            ]
            assert space.upper_bound(7) == space.expand(np.array([6], dtype=np.int32))[-1] + 1


def test_expansion_clamps_missing_blocks() -> None:
    spec = KVCacheLayerSpec(
        layer_id=0,
        owner=DRAFT,
        dtype=ElementType.BFLOAT16,
        num_kv_heads=2,
        head_dim=64,
        tokens_per_page=32,
    )
    plan = LayoutPlan.derive([spec], tokens_per_block=128)
    key = IndexSpace.of(plan.address(0, BufferRole.KEY), IndexKind.PER_LAYER)
    value = IndexSpace.of(plan.address(0, BufferRole.VALUE), IndexKind.PER_LAYER)
    table = np.array([[5, -1], [0, 1]], dtype=np.int32)
    assert key.expand(table).tolist() == [[40, 41, 42, 43, 0, 0, 0, 0], [0, 1, 2, 3, 8, 9, 10, 11]]
    assert value.expand(table)[0, :4].tolist() == [44, 45, 46, 47]


def test_mixed_windows_make_two_layer_groups() -> None:
    plan = LayoutPlan.derive(GEMMA, tokens_per_block=64, max_sequence_tokens=8192)
    assert [len(group.layer_ids) for group in plan.layer_groups] == [22, 4]
    assert [group.life_cycle.window for group in plan.layer_groups] == [512, None]
    assert [view.whole_slot for view in plan.views] == [True, True]
    assert plan.bytes_per_token == 26 * 2 * 256 * 2
    assert plan.layer_group_of(5).id == 1
    short = LayoutPlan.derive(GEMMA, tokens_per_block=64, max_sequence_tokens=512)
    assert len(short.layer_groups) == 1


def test_equal_slot_sizes_share_a_pool_group() -> None:
    plan = plan_of("mixed, one pool group")
    assert [group.layer_groups for group in plan.pool_groups] == [(0, 1)]
    assert plan.resident_slots(20) == (5 + 2,)


def test_target_and_draft_share_slots_but_no_view() -> None:
    plan = LayoutPlan.derive([layer(0), layer(1, owner=DRAFT)], tokens_per_block=4)
    assert len(plan.layer_groups) == 1
    assert [(view.owner, view.whole_slot) for view in plan.views] == [
        (TARGET, False),
        (DRAFT, False),
    ]


def test_data_and_scales_are_two_pools_under_one_index() -> None:
    spec = KVCacheLayerSpec(
        layer_id=0,
        owner=TARGET,
        dtype=ElementType.PACKED4,
        num_kv_heads=4,
        head_dim=64,
        scale_block_elements=16,
    )
    plan = LayoutPlan.derive([spec], tokens_per_block=64)
    data, scale = (plan.address(0, r) for r in (BufferRole.KEY, BufferRole.KEY_SCALE))
    assert (data.pool_group, data.pool) == (0, 0)
    assert (scale.pool_group, scale.pool) == (0, 1)
    assert plan.pool_groups[0].slot_bytes == (2 * 4 * 64 * 32, 2 * 4 * 64 * 4)


def test_third_buffer_in_the_slot_moves_the_stride() -> None:
    """Index keys as large as a page of keys: three pages a layer, so no stride is 'K plus V'."""
    index = BufferSpec(
        role=BufferRole.INDEX_KEY,
        dtype=ElementType.BFLOAT16,
        num_heads=1,
        elements_per_head=128,
        mapping=PageMapping.REPLICATED,
    )
    specs = [
        KVCacheLayerSpec(
            layer_id=layer_id,
            owner=TARGET,
            dtype=ElementType.BFLOAT16,
            num_kv_heads=1,
            head_dim=128,
            extra_buffers=(index,),
        )
        for layer_id in range(2)
    ]
    plan = LayoutPlan.derive(specs, tokens_per_block=64)
    assert IndexSpace.of(plan.address(1, BufferRole.VALUE), IndexKind.PER_LAYER).scale == 6
    assert plan.address(1, BufferRole.KEY).offset_bytes == 3 * 64 * 128 * 2
    assert [(v.geometry.mapping, len(v.buffers)) for v in plan.views] == [
        (PageMapping.HEAD_MAJOR, 4),
        (PageMapping.REPLICATED, 2),
    ]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="layer id 0 occurs twice"):
        LayoutPlan.derive([layer(0), layer(0, owner=DRAFT)], tokens_per_block=4)
    with pytest.raises(ValueError, match="at least one layer"):
        LayoutPlan.derive([], tokens_per_block=4)
    odd = KVCacheLayerSpec(**{**vars(layer(0)), "tokens_per_page": 3})
    with pytest.raises(ValueError, match="do not divide blocks of 4"):
        LayoutPlan.derive([odd], tokens_per_block=4)
    with pytest.raises(KeyError, match=r"no value_scale buffer; it has \['key', 'value'\]"):
        plan_of("full").address(0, BufferRole.VALUE_SCALE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_stay_within_the_quota_and_above_the_floors(name: str) -> None:
    plan = plan_of(name)
    demand = SizingDemand(chunk_tokens=32, resident_sequences=4, typical_sequence_tokens=64)
    for quota in (20_000, 100_000, 1_000_000):
        try:
            slots = plan.slots_for(quota, demand)
        except ValueError as error:
            assert "raise the cache bytes" in str(error)  # noqa: PT017
            assert quota == 20_000
            continue
        used = plan.pool_bytes(slots)
        assert used <= quota
        if plan.layer_groups[0].life_cycle.is_full:
            assert used > 0.9 * quota - 8_000
            assert plan.sequence_capacity_tokens(slots, demand) >= 32


def test_windowed_pool_is_sized_for_windows_not_for_tokens() -> None:
    plan = LayoutPlan.derive(GEMMA, tokens_per_block=64)
    demand = SizingDemand(chunk_tokens=512, resident_sequences=16)
    windowed, full = plan.slots_for(1 << 30, demand)
    live = plan.layer_groups[0].life_cycle.most_live_blocks(1, 64)
    assert windowed >= 16 * live + 8
    assert full > 3 * windowed
    assert plan.sequence_capacity_tokens((windowed, full), demand) == full * 64


def test_recurrent_slots_do_not_grow_with_tokens() -> None:
    plan = LayoutPlan.derive([layer(0), state_layer(1)], tokens_per_block=4)
    demand = SizingDemand(chunk_tokens=16, resident_sequences=8, typical_sequence_tokens=10**9)
    assert plan.slots_for(1 << 20, demand)[1] == plan.slots_for(1 << 22, demand)[1] == 16
