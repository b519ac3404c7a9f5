"""Grouping, coalescing, addresses and views."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvcache_core.draft_layers import append_draft_layers
from kvcache_core.index_space import IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.pointer_table import per_layer_pointers, pool_pointers
from kvcache_core.sizing_demand import SizingDemand
from kvcache_core.spec import (
    BufferRole,
    ElementType,
    IndexKind,
    KVCacheLayerSpec,
    PageMapping,
)
from tests.kvcache_core.samples import (
    BF16,
    DRAFT,
    FP8,
    FP32,
    GEMMA,
    GIB,
    KEY,
    OPTIONAL,
    PACKED4,
    TARGET,
    VALUE,
    Pools,
    attention,
    derive,
    draft,
    index_keys,
    packed,
    states,
)
from tests.kvcache_core.strategies import BLOCK, spec_lists


@settings(max_examples=40, deadline=None)
@given(specs=spec_lists(8), data=st.data())
def test_every_byte_belongs_to_one_buffer(
    specs: list[KVCacheLayerSpec], data: st.DataObject
) -> None:
    """Real pools of an odd number of slots: pages written one after the other never overlap."""
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    shuffled = data.draw(st.permutations(specs))
    assert LayoutPlan.derive(shuffled, tokens_per_block=BLOCK) == plan
    for group in plan.layer_groups:
        pools = Pools(plan, [3] * len(plan.pool_groups))
        for layer_id in group.layer_ids:
            for buffer in plan.spec(layer_id).buffers:
                address = plan.address(layer_id, buffer.role)
                assert address.layer_group == group.id
                for slot in range(3):
                    for page in range(address.geometry.pages_per_block):
                        start = address.byte_offset(slot, page)
                        assert start % 64 == 0
                        written = pools.at(address, start, address.geometry.page_stride_bytes)
                        assert written.size == address.geometry.page_stride_bytes
                        assert not written.any()
                        written[:] = 1
        for pool in pools.pools[group.pool_group]:
            assert pool.all()
    for view in plan.views:
        assert {plan.owner(b.layer_id) for b in view.buffers} == {view.owner}
        assert {b.geometry for b in view.buffers} == {view.geometry}
    assert sum(len(view.buffers) for view in plan.views) == len(plan.addresses)


def naive_block_bytes(spec: KVCacheLayerSpec, tokens: int) -> int:
    """Bytes of a block of one layer, counted bit by bit; pages start at multiples of 64 bytes."""

    def pages(elements_per_token: int, bits: int, page_tokens: int | None) -> int:
        page_tokens = page_tokens or tokens
        page = (elements_per_token * page_tokens * bits + 7) // 8
        return (page + 63) // 64 * 64 * (tokens // page_tokens)

    bits = {FP32: 32, BF16: 16, FP8: 8, PACKED4: 4}
    row = spec.num_kv_heads * spec.head_dim
    total = spec.kv_factor * pages(row, bits[spec.dtype], spec.tokens_per_page)
    if spec.scale_block_elements is not None:
        scales = row // spec.scale_block_elements
        total += spec.kv_factor * pages(scales, 8, spec.tokens_per_page)
    for extra in spec.extra_buffers:
        total += pages(extra.elements_per_head, bits[extra.dtype], extra.tokens_per_page)
    return total


@settings(max_examples=60, deadline=None)
@given(specs=spec_lists(8))
def test_b01_bytes_equal_a_naive_count(specs: list[KVCacheLayerSpec]) -> None:
    """Restated: no second path computes sizes; an independent count agrees with the plan's."""
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    for group in plan.layer_groups:
        if not group.life_cycle.is_state:
            layers = [plan.spec(layer) for layer in group.layer_ids]
            expected = sum(naive_block_bytes(spec, BLOCK) for spec in layers)
            assert group.bytes_per_slot == expected


@pytest.mark.parametrize(
    ("change", "token_bytes"),
    [
        ({"dtype": FP8}, 256 + 128),
        ({"num_kv_heads": 3}, 256 + 768),
        ({"head_dim": 32}, 256 + 128),
        ({"kv_factor": 1}, 256 + 128),
        ({"extra_buffers": (index_keys(32),)}, 256 + 256 + 64),
        ({"dtype": PACKED4, "scale_block_elements": 16}, 256 + 72),
    ],
)
def test_k03_everything_follows_from_the_specs(change: dict[str, object], token_bytes: int) -> None:
    """Restated: specs are the only input. One changed field moves addresses, index space, pointer
    table, bytes, slots and estimate together, and nothing else needs to be told.
    """
    changed = replace(attention(1), **change)  # type: ignore[arg-type]
    specs = [attention(0), changed, attention(2, window=100)]
    plan = derive(*specs)
    assert plan.bytes_per_token == token_bytes + 256
    slots = plan.slots_for(GIB)
    assert plan.estimate(GIB).slots == slots
    assert 0.999 * GIB < plan.pool_bytes(slots) <= GIB
    # a window of 100 keeps 3 of the 32 blocks of a typical sequence
    assert slots[0] == pytest.approx(GIB / 64 / (token_bytes + 256 * 3 / 32), rel=0.001)
    pools = Pools(plan)
    pointers = per_layer_pointers(plan, pool_pointers(plan, pools.bases))
    for layer_id in (0, 1, 2):
        address = plan.address(layer_id, KEY)
        base = pools.bases[address.pool_group][address.pool]
        assert pointers[layer_id, address.pool, 0] == base + address.offset_bytes
        assert pointers[layer_id, address.pool, 1] == address.slot_bytes
        space = plan.index_space(layer_id, KEY)
        assert space.byte_offset(5) == address.byte_offset(5)


def test_k03_a_plan_is_a_value() -> None:
    """Restated: no manager exists without its specs, so that no default can stand in for them."""
    assert derive(*GEMMA) == derive(*reversed(GEMMA))
    assert derive(*GEMMA) != derive(*GEMMA[:-1])
    with pytest.raises(ValueError, match="at least one layer"):
        derive()


def test_k05_windows_are_normalised_in_groups_and_sizes_alike() -> None:
    """512 tokens at most: a window of 512 is none, one of 511 is a life cycle."""
    specs = [attention(0), attention(1, window=512)]
    short = derive(*specs, longest=512)
    assert [group.layer_ids for group in short.layer_groups] == [(0, 1)]
    assert short.layer_groups[0].life_cycle.is_full
    full = derive(attention(0), attention(1), longest=512)
    assert short.slots_for(GIB) == full.slots_for(GIB)
    assert short.estimate(GIB) == full.estimate(GIB)
    assert short.cost_classes == full.cost_classes
    limited = derive(attention(0), attention(1, window=511), longest=512)
    assert [group.life_cycle.window for group in limited.layer_groups] == [None, 511]
    assert limited.slots_for(GIB) != full.slots_for(GIB)


def test_b02_window_beyond_the_longest_sequence_is_full_attention() -> None:
    """With sinks too: a layer that sees everything has no sinks to keep apart."""
    plan = derive(attention(0), attention(1, window=8192, sink_tokens=64), longest=4096)
    assert [group.life_cycle.sink_blocks for group in plan.layer_groups] == [0]
    kept = derive(attention(0), attention(1, window=8192, sink_tokens=65), longest=8193)
    assert [group.life_cycle.sink_blocks for group in kept.layer_groups] == [0, 2]
    assert kept.layer_groups[1].life_cycle.window == 8192


def test_k06_buffers_coalesce_by_life_cycle_group_and_size() -> None:
    """Layer 1 has the size of layer 0 with another dtype, layer 2 another size, layer 3 another
    coalescing group, layer 4 another life cycle.
    """
    plan = derive(
        attention(0, BF16, 2, 64),
        attention(1, FP8, 4, 64),
        attention(2, FP8, 2, 64),
        attention(3, BF16, 2, 64, coalescing_group=1),
        attention(4, BF16, 2, 64, window=100),
    )
    size = 2 * 64 * 64 * 2
    places = {spec.layer_id: plan.address(spec.layer_id, KEY) for spec in plan.specs}
    assert [(a.layer_group, a.pool, a.offset_bytes) for a in places.values()] == [
        (0, 0, 0),
        (0, 0, 2 * size),
        (0, 2, 0),
        (0, 1, 0),
        (1, 0, 0),
    ]
    assert plan.layer_groups[0].slot_bytes == (4 * size, 2 * size, size)
    assert plan.layer_groups[1].slot_bytes == (2 * size,)


def test_k06_expanded_size_counts_all_pages_of_a_block() -> None:
    """Pages of 32 tokens twice as wide as pages of 64: one key, because a block is as large."""
    plan = derive(attention(0, heads=2), attention(1, heads=2, tokens_per_page=16))
    assert len(plan.layer_groups[0].slot_bytes) == 1
    assert plan.address(1, KEY).geometry.pages_per_block == 4


def test_k07_data_and_scales_are_two_pools_under_one_index() -> None:
    specs = [packed(layer, 4, 64, index_kind=IndexKind.PER_LAYER) for layer in range(3)]
    plan = derive(*specs)
    assert plan.pool_groups[0].slot_bytes == (6 * 4 * 32 * 64, 6 * 4 * 4 * 64)
    pools = Pools(plan)
    for layer in range(3):
        for data_role, scale_role in (
            (KEY, BufferRole.KEY_SCALE),
            (VALUE, BufferRole.VALUE_SCALE),
        ):
            data, scale = plan.address(layer, data_role), plan.address(layer, scale_role)
            assert (data.pool_group, scale.pool_group) == (0, 0)
            assert (data.pool, scale.pool) == (0, 1)
            data_space = plan.index_space(layer, data_role)
            scale_space = plan.index_space(layer, scale_role)
            for slot in (1, 3, 6):
                index = data_space.expand(np.array([slot], dtype=np.int32))
                assert (index == scale_space.expand(np.array([slot], dtype=np.int32))).all()
                pools.slot_view(scale)[slot] = 10 * layer + slot
                at = scale_space.byte_offset(int(index[0]))
                assert (pools.at(scale, at, scale.bytes) == 10 * layer + slot).all()


def test_k07_layers_without_scales_may_not_shift_the_data() -> None:
    """fp8 keys half as wide are as large as packed ones, share their pool, and have no scales."""
    specs = [packed(0, 4, 64, index_kind=IndexKind.SHARED), attention(1, FP8, 4, 32)]
    with pytest.raises(ValueError, match=r"slot \* 4 \+ 0, its scales slot \* 2 \+ 0"):
        derive(*specs)
    apart = [specs[0], replace(specs[1], coalescing_group=2)]
    assert derive(*apart).layer_groups[0].slot_bytes == (2 * 4 * 32 * 64, 2 * 4 * 32 * 64, 2048)


def test_b07_odd_slots_of_coalesced_layers_are_addressed_by_the_slot_stride() -> None:
    """Strided views of real memory, written through, are found by the address rule and by every
    index space, in odd slots and the last one.
    """
    plan = derive(
        packed(0, 2, 64), attention(1, FP8, 2, 32), packed(2, 2, 64), attention(3, kv_factor=1)
    )
    pools = Pools(plan)
    rng = np.random.default_rng(0)
    for address in plan.addresses.values():
        view = pools.slot_view(address)
        view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)
    for address in plan.addresses.values():
        for slot in (0, 1, 3, 5, 6):
            expected = pools.slot_view(address)[slot]
            at = address.byte_offset(slot)
            assert np.array_equal(pools.at(address, at, address.bytes), expected)
            for kind in IndexKind:
                space = IndexSpace.of(address, kind)
                index = int(space.expand(np.array([slot], dtype=np.int32))[0])
                found = pools.at(address, space.byte_offset(index), address.bytes)
                assert np.array_equal(found, expected), (address, kind, slot)


def test_k09_a_slot_stride_is_no_multiple_of_one_layer() -> None:
    """Index keys of layer 0 lie before layer 1: its keys are not behind two pages."""
    plan = derive(attention(0, head_dim=128, extra_buffers=(index_keys(),)), attention(1, heads=2))
    first, second = plan.address(0, KEY), plan.address(1, KEY)
    page = 64 * 128 * 2
    assert (first.slot_bytes, second.offset_bytes) == (5 * page, 3 * page)
    assert second.byte_offset(3) == 3 * 5 * page + 3 * page
    assert second.byte_offset(3) != 3 * 2 * page + 3 * page


def test_b48_third_buffer_in_the_slot_moves_the_stride() -> None:
    """Index keys as large as a page of keys: three pages a layer, so no stride is 'K plus V'."""
    specs = [attention(n, head_dim=128, extra_buffers=(index_keys(128),)) for n in range(2)]
    plan = derive(*specs)
    assert IndexSpace.of(plan.address(1, VALUE), IndexKind.PER_LAYER).scale == 6
    alone = derive(specs[0]).address(0, VALUE)
    assert IndexSpace.of(alone, IndexKind.PER_LAYER).scale == 3
    assert plan.address(1, KEY).offset_bytes == 3 * 64 * 128 * 2
    assert [(v.geometry.mapping, len(v.buffers)) for v in plan.views] == [
        (PageMapping.HEAD_MAJOR, 4),
        (PageMapping.REPLICATED, 2),
    ]


def test_k31_appended_draft_layers_have_their_own_pointer_and_scale() -> None:
    """The target takes slots, the drafter pages of 32 tokens in its own pool."""
    target = [packed(layer, 4, 128) for layer in range(5)]
    drafts = [
        draft(n, FP8, 2, 128, policy=OPTIONAL, tokens_per_page=32, index_kind=IndexKind.PER_LAYER)
        for n in range(2)
    ]
    plan = derive(*append_draft_layers(target, drafts, num_target_layers=40), tokens_per_block=128)
    assert plan.layer_ids == (0, 1, 2, 3, 4, 40, 41)
    assert [group.layer_ids for group in plan.layer_groups] == [(0, 1, 2, 3, 4), (40, 41)]
    assert plan.pool_groups[1].slot_bytes == (2 * 2 * 2 * 128 * 128,)
    assert plan.index_space(41, KEY).scale == 16
    assert plan.index_space(41, KEY).bias == 8
    assert plan.index_space(4, KEY).scale == 1
    assert plan.spec(40).dtype is FP8
    assert plan.slots_for(GIB)[1] > 0
    classes = [(entry.owner, entry.token_bytes) for entry in plan.cost_classes]
    assert classes == [(TARGET, 5 * 2 * 4 * 72), (DRAFT, 2 * 2 * 2 * 128)]


def test_b33_draft_pool_pointers_reach_real_pages() -> None:
    target = [attention(layer, BF16, 4, 64) for layer in range(3)]
    plan = derive(
        *append_draft_layers(
            target,
            [draft(n, FP8, 1, 64, window=100, index_kind=IndexKind.PER_LAYER) for n in (0, 1)],
            num_target_layers=3,
        )
    )
    pools = Pools(plan, [4, 7])
    table = per_layer_pointers(plan, pool_pointers(plan, pools.bases))
    for row, layer in enumerate(plan.layer_ids):
        address = plan.address(layer, KEY)
        pools.slot_view(address)[-1] = 100 + layer
        pointer, stride = table[row, address.pool]
        last = pools.slots[address.pool_group] - 1
        at = int(pointer + last * stride - pools.bases[address.pool_group][address.pool])
        assert (pools.at(address, at, address.bytes) == 100 + layer).all()
    assert table[3, 0, 1] == 2 * 2 * 64 * 64
    assert table[0, 0, 1] == 3 * 2 * 4 * 64 * 64 * 2


def test_b26_float_target_and_fp8_draft_lie_in_their_own_pools() -> None:
    """One life cycle even: the dtype alone separates pools, views and addresses."""
    plan = derive(
        attention(0, ElementType.FLOAT32, 2), attention(1, ElementType.FLOAT32, 2), draft(2, FP8, 2)
    )
    assert len(plan.layer_groups) == 1
    assert plan.layer_groups[0].slot_bytes == (4 * 2 * 64 * 64 * 4, 2 * 2 * 64 * 64)
    assert [(view.owner, view.pool, view.whole_slot) for view in plan.views] == [
        (TARGET, 0, True),
        (DRAFT, 1, True),
    ]
    pools = Pools(plan)
    target, drafter = plan.address(1, VALUE), plan.address(2, VALUE)
    pools.slot_view(target)[:] = 1
    pools.slot_view(drafter)[:] = 2
    assert (pools.at(target, target.byte_offset(5), target.bytes) == 1).all()
    assert (pools.at(drafter, drafter.byte_offset(5), drafter.bytes) == 2).all()


def test_mixed_windows_make_two_layer_groups() -> None:
    plan = derive(*GEMMA, longest=8192)
    assert [len(group.layer_ids) for group in plan.layer_groups] == [22, 4]
    assert [group.life_cycle.window for group in plan.layer_groups] == [512, None]
    assert [view.whole_slot for view in plan.views] == [True, True]
    assert plan.bytes_per_token == 26 * 2 * 256 * 2
    assert plan.layer_group_of(5).id == 1


def test_equal_slot_sizes_share_a_pool_group() -> None:
    plan = derive(attention(0), attention(1, window=6), tokens_per_block=4)
    assert [group.layer_groups for group in plan.pool_groups] == [(0, 1)]
    assert plan.resident_slots(20) == (5 + 2,)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="layer id 0 occurs twice"):
        derive(attention(0), draft(0))
    with pytest.raises(ValueError, match="do not divide blocks of 64"):
        derive(attention(0, tokens_per_page=3))
    with pytest.raises(ValueError, match="tokens_per_block must be positive"):
        derive(attention(0), tokens_per_block=0)
    with pytest.raises(ValueError, match="max_sequence_tokens must be positive"):
        derive(attention(0), longest=0)
    plan = derive(attention(0), states(1))
    with pytest.raises(KeyError, match=r"no value_scale buffer; it has \['key', 'value'\]"):
        plan.address(0, BufferRole.VALUE_SCALE)
    with pytest.raises(KeyError, match="no layer 9"):
        plan.layer_group_of(9)
    with pytest.raises(KeyError, match=r"the plan has \[0, 1\]"):
        plan.spec(9)


def test_a_plan_can_be_asked_with_any_demand() -> None:
    """The default demand is what worker code relies on: no drafter, no dummies, no headroom."""
    plan = derive(*GEMMA, longest=8192)
    assert plan.slots_for(GIB) == plan.slots_for(GIB, SizingDemand())
    assert isinstance(plan.layer_groups[0].life_cycle, LifeCycle)
