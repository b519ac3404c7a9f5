"""Index spaces, lists, pointer tables and sub-page views over real memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import kvcache_core
from kvcache_core.errors import InvariantViolation
from kvcache_core.index_space import IndexKind, IndexSpace, allocation_extents
from kvcache_core.layout import LayoutPlan
from kvcache_core.pointer_table import per_layer_pointers, pool_pointers
from kvcache_core.spec import BufferRole, KVCacheLayerSpec
from kvcache_core.subpage import draft_subpage_view, subpage_view
from tests.kvcache_core.samples import (
    BF16,
    FP8,
    KEY,
    OPTIONAL,
    PACKED4,
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

PER_LAYER, SHARED, RAW = IndexKind.PER_LAYER, IndexKind.SHARED, IndexKind.RAW_SLOT


def slots_of(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(slots, dtype=np.int32)


@settings(max_examples=40, deadline=None)
@given(specs=spec_lists())
def test_index_spaces_go_there_and_back(specs: list[KVCacheLayerSpec]) -> None:
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    slots = slots_of(0, 3, 6, 1)
    for address in plan.addresses.values():
        for kind in IndexKind:
            try:
                space = IndexSpace.of(address, kind)
            except ValueError:
                assert kind is not RAW
                continue
            indices = space.expand(slots)
            assert indices.dtype == np.int32
            per_block = space.pages_per_block
            for position, index in enumerate(indices.tolist()):
                block, page = divmod(position, per_block)
                assert space.slot_of(index) == slots[block]
                at = space.byte_offset(index)
                assert at == address.byte_offset(int(slots[block]), page)
            assert space.upper_bound(7) == space.expand(slots_of(6))[-1] + 1


@settings(max_examples=40, deadline=None)
@given(specs=spec_lists(8), kind=st.sampled_from([SHARED, PER_LAYER]))
def test_a_shared_list_is_right_for_each_of_its_layers(
    specs: list[KVCacheLayerSpec], kind: IndexKind
) -> None:
    """One expansion, from the first layer's space, finds the keys and values of all of them."""
    specs = [
        spec if spec.is_recurrent else replace(spec, index_kind=kind, scale_block_elements=None)
        for spec in specs
        if spec.dtype is not PACKED4 or spec.is_recurrent
    ]
    if not specs:
        return
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    lists = plan.index_lists(plan.layer_ids)
    attention_ids = [spec.layer_id for spec in plan.specs if not spec.is_recurrent]
    assert sorted(layer for entry in lists for layer in entry.layer_ids) == attention_ids
    for entry in lists:
        pages = entry.space.expand(slots_of(5, 2)).tolist()
        for layer in entry.layer_ids:
            assert plan.spec(layer).kv_factor == entry.key.kv_factor
            space, key = plan.index_space(layer, KEY), plan.address(layer, KEY)
            per_block = space.pages_per_block
            for position, index in enumerate(pages):
                slot, page = (5, 2)[position // per_block], position % per_block
                assert space.byte_offset(index) == key.byte_offset(slot, page)
                if entry.key.value_offset is not None:
                    value = space.byte_offset(index + entry.key.value_offset)
                    assert value == plan.address(layer, VALUE).byte_offset(slot, page)


def test_a_space_that_contradicts_the_address_is_refused_when_made() -> None:
    """Same space, another address: the round trip finds it."""
    plan = derive(attention(0), attention(1))
    space = IndexSpace.of(plan.address(1, KEY), PER_LAYER)
    wrong = replace(space, bias=space.bias + 1)
    with pytest.raises(InvariantViolation, match="maps slot 0 page 0 to"):
        wrong.check(plan.address(1, KEY))
    foreign = replace(plan.address(0, KEY), slot_bytes=plan.address(0, KEY).slot_bytes + 64)
    with pytest.raises(ValueError, match="pages of 8192 bytes do not tile slots of 32832 bytes"):
        IndexSpace.of(foreign, SHARED)


def test_k08_layers_share_a_list_only_when_kernels_plan_alike() -> None:
    """Shared lists: same group, stride, kv_factor, geometry and value offset; else one each."""
    specs = [
        attention(0, heads=2, index_kind=SHARED),
        attention(1, heads=2, index_kind=SHARED),
        attention(2, heads=2, kv_factor=1, index_kind=SHARED),  # as large a page, no values
        attention(3, FP8, 4, index_kind=SHARED),  # as large a page, other dtype and heads
        attention(4, heads=2, window=100, index_kind=SHARED),  # other slots
        attention(5, heads=2, extra_buffers=(index_keys(128),), index_kind=SHARED),
        attention(6),
        states(7),
        attention(8, heads=2, coalescing_group=3, index_kind=SHARED),  # other pool, other stride
    ]
    plan = derive(*specs)
    lists = plan.index_lists(plan.layer_ids)
    assert [entry.layer_ids for entry in lists] == [(0, 1, 5), (2,), (3,), (4,), (8,)]
    assert [entry.key.kv_factor for entry in lists] == [2, 1, 2, 2, 2]
    assert [entry.key.value_offset for entry in lists] == [1, None, 1, 1, 1]
    assert [entry.layer_group for entry in lists] == [0, 0, 0, 1, 0]
    assert lists[0].key.scale == lists[1].key.scale == lists[2].key.scale
    # one list each by bias where the pointer is the pool's
    own = derive(*(replace(spec, index_kind=PER_LAYER) for spec in specs[:2]))
    assert [entry.layer_ids for entry in own.index_lists((0, 1))] == [(0,), (1,)]


@pytest.mark.parametrize("kind", list(IndexKind))
def test_b04_key_only_beside_pairs_reaches_its_own_pages(kind: IndexKind) -> None:
    """Real memory, written by strides and read through the index a kernel would compute."""
    plan = derive(
        attention(0, heads=2, index_kind=kind),
        attention(1, heads=2, kv_factor=1, index_kind=kind),
        attention(2, heads=2, index_kind=kind),
    )
    pools = Pools(plan, [5])
    for (layer, role), address in plan.addresses.items():
        for slot in range(5):
            pools.slot_view(address)[slot] = 16 * slot + 4 * layer + (role is VALUE)
    for layer, role in plan.addresses:
        space = plan.index_space(layer, role)
        address = plan.address(layer, role)
        assert space.kind is kind
        for slot, index in zip((1, 3, 4), space.expand(slots_of(1, 3, 4)).tolist(), strict=True):
            page = pools.at(address, space.byte_offset(index), address.bytes)
            assert (page == 16 * slot + 4 * layer + (role is VALUE)).all()
    for layer in (0, 2):
        if kind is not RAW:
            (entry,) = plan.index_lists((layer,))
            key = plan.index_space(layer, KEY)
            offset = entry.key.value_offset
            assert offset is not None
            value = key.base_offset_bytes + (key.bias + offset + 3 * key.scale) * key.unit_bytes
            assert value == plan.address(layer, VALUE).byte_offset(3)


def test_k10_pointer_tables_have_two_shapes() -> None:
    plan = derive(
        packed(0, 2), packed(1, 2), attention(2, window=100), draft(3, FP8, policy=OPTIONAL)
    )
    pools = Pools(plan)
    table = pool_pointers(plan, pools.bases)
    assert (table.dtype, table.shape) == (np.dtype(np.int64), (4, 2))
    assert table[:, 0].tolist() == [base for bases in pools.bases for base in bases]
    assert table[:, 1].tolist() == [2 * 2 * 2 * 32 * 64, 2 * 2 * 2 * 4 * 64, 16384, 8192]
    layers = per_layer_pointers(plan, table)
    assert (layers.dtype, layers.shape) == (np.dtype(np.int64), (4, 2, 2))
    scale = plan.address(1, BufferRole.KEY_SCALE)
    assert layers[1, 1].tolist() == [table[1, 0] + scale.offset_bytes, scale.slot_bytes]
    assert layers[2, 1].tolist() == [0, 0]
    assert layers[3, 0, 0] == table[3, 0]
    assert per_layer_pointers(plan, layers) is layers


def test_b07_pointer_tables_of_another_shape_are_refused() -> None:
    plan = derive(packed(0), attention(1, window=100))
    table = pool_pointers(plan, [[64, 128], [256]])
    wrong_tables: list[Any] = [table[:2], table.T, table[None, None], table.astype(np.int32)]
    for wrong in wrong_tables:
        with pytest.raises(ValueError, match=r"expected int64 pointers \[3, 2\] or \[2, 2, 2\]"):
            per_layer_pointers(plan, wrong)
    with pytest.raises(ValueError, match=r"expected base addresses of \[2, 1\] pools"):
        pool_pointers(plan, [[64], [256]])


def test_k11_upper_bounds_follow_the_layer() -> None:
    """Slots are 5 pages of 8 KiB; the bound is the last page that the layer itself can reach."""
    plan = derive(attention(0), attention(1, kv_factor=1), attention(2, tokens_per_page=16))
    bounds = {
        (layer, kind): IndexSpace.of(plan.address(layer, KEY), kind).upper_bound(7)
        for layer in (0, 1, 2)
        for kind in IndexKind
    }
    assert bounds == {
        (0, RAW): 7,
        (0, SHARED): 6 * 5 + 1,
        (0, PER_LAYER): 6 * 5 + 1,
        (1, RAW): 7,
        (1, SHARED): 6 * 5 + 1,
        (1, PER_LAYER): 6 * 5 + 2 + 1,
        (2, RAW): 7,
        (2, SHARED): 6 * 20 + 4,
        (2, PER_LAYER): 6 * 20 + 3 * 4 + 4,
    }


def test_b03_keys_alone_do_not_halve_the_free_blocks() -> None:
    plan = derive(attention(0, heads=2), attention(1, kv_factor=1, window=100))
    assert [plan.layer_blocks(layer, (11, 23)) for layer in (0, 1)] == [11, 23]
    assert plan.pool_groups[1].bytes_per_slot == 64 * 64 * 2


def test_k21_only_requested_lists_are_made() -> None:
    """Sixty sparse layers on raw slots need none; the drafter has one, that of its first layer."""
    target = [attention(n, FP8, extra_buffers=(index_keys(),)) for n in range(60)]
    drafts = [
        draft(60 + n, heads=2, policy=OPTIONAL, index_kind=PER_LAYER, tokens_per_page=32)
        for n in range(2)
    ]
    plan = derive(*target, *drafts)
    (only,) = plan.drafter_lists()
    assert only.layer_ids == (60,)
    assert only.layer_group == 1
    assert (only.space.scale, only.space.bias) == (8, 0)
    assert plan.index_lists(range(60)) == ()
    assert [entry.layer_ids for entry in plan.index_lists((61,))] == [(61,)]
    assert derive(*target).drafter_lists() == ()


def test_b13_a_step_converts_no_target_layer() -> None:
    """Every layer converted cost 3 ms a step; here as many lists as kinds of draft layer."""
    target = [attention(n, heads=2, index_kind=SHARED) for n in range(60)]
    plan = derive(*target, draft(60, heads=2, policy=OPTIONAL, index_kind=SHARED))
    assert len(plan.index_lists(plan.layer_ids)) == 2
    assert [entry.layer_ids for entry in plan.drafter_lists()] == [(60,)]


def test_k27_extent_ends_behind_the_last_valid_entry() -> None:
    table = slots_of(-1, -1, 4, 9, -1, 7, -1, -1)
    assert allocation_extents(table) == 6
    rows = np.stack([table, np.full(8, -1, dtype=np.int32), np.arange(8, dtype=np.int32)])
    assert allocation_extents(rows).tolist() == [6, 0, 8]
    assert allocation_extents(rows[:, :0]).tolist() == [0, 0, 0]


def test_b08_a_window_keeps_its_position() -> None:
    """66 blocks, of which a window has dropped all but the last three."""
    table = np.full(80, -1, dtype=np.int32)
    table[63:66] = (5, 2, 0)
    assert int(allocation_extents(table)) == 66
    assert int((table >= 0).sum()) == 3


DRAFTS = [
    draft(60 + n, heads=2, head_dim=64, policy=OPTIONAL, tokens_per_page=32, index_kind=PER_LAYER)
    for n in range(2)
]


def test_k35_sub_pages_of_all_draft_layers() -> None:
    """128-token blocks, 32-token kernels: four key pages, then four value pages, in each slot."""
    plan = derive(attention(0), *DRAFTS, tokens_per_block=128)
    view = draft_subpage_view(plan, 32)
    assert (view.tokens_per_block, view.subdivision, view.value_offset) == (32, 4, 4)
    assert (view.layer_group, view.pool_group, view.pool) == (1, 1, 0)
    table = np.array([[5, -1], [0, 1]], dtype=np.int32)
    assert view.expand_keys(60, table).tolist() == [
        [80, 81, 82, 83, 0, 0, 0, 0],
        [0, 1, 2, 3, 16, 17, 18, 19],
    ]
    assert view.expand_values(60, table).tolist() == [
        [84, 85, 86, 87, 0, 0, 0, 0],
        [4, 5, 6, 7, 20, 21, 22, 23],
    ]
    assert view.expand_keys(61, table)[0, :4].tolist() == [88, 89, 90, 91]
    pools = Pools(plan)
    for layer in (60, 61):
        for role, expand in ((KEY, view.expand_keys), (VALUE, view.expand_values)):
            address = plan.address(layer, role)
            pages = pools.slot_view(address).reshape(7, 4, -1)
            pages[:] = np.arange(28).reshape(7, 4, 1)
            unit = address.geometry.page_stride_bytes
            for index, expected in zip(
                expand(layer, slots_of(6, 3)).tolist(),
                [24, 25, 26, 27, 12, 13, 14, 15],
                strict=True,
            ):
                assert (pools.at(address, index * unit, unit) == expected).all()


def test_k35_one_page_a_block_is_the_identity() -> None:
    plan = derive(attention(0), draft(1, policy=OPTIONAL, index_kind=SHARED, kv_factor=1))
    view = draft_subpage_view(plan, 64)
    assert (view.subdivision, view.value_offset) == (1, None)
    assert view.expand_keys(1, slots_of(4, 0, 6)).tolist() == [4, 0, 6]
    with pytest.raises(ValueError, match="has keys only"):
        view.expand_values(1, slots_of(4))


def test_k35_a_third_buffer_moves_scale_but_not_the_values() -> None:
    """Index keys behind keys and values, as large as they: three buffers a slot."""
    spec = attention(0, head_dim=128, tokens_per_page=32, extra_buffers=(index_keys(128),))
    plan = derive(spec, tokens_per_block=128)
    view = subpage_view(plan, [0], 32)
    assert (view.keys[0].scale, view.value_offset) == (12, 4)
    assert view.expand_values(0, slots_of(1)).tolist() == [16, 17, 18, 19]


def test_b43_other_page_sizes_are_refused() -> None:
    plan = derive(attention(0), *DRAFTS, tokens_per_block=128)
    for size in (16, 64, 128, 0, -32):
        with pytest.raises(ValueError, match=f"pages of {size} tokens, layer 60 has pages of 32"):
            draft_subpage_view(plan, size)


def test_b51_the_plan_decides_whether_there_is_a_view() -> None:
    """Restated: no configuration flag says that drafts are shared; the specs in the plan do."""
    with pytest.raises(ValueError, match="no draft attention layers"):
        draft_subpage_view(derive(attention(0, tokens_per_page=32)), 32)
    apart = [DRAFTS[0], replace(DRAFTS[1], window=100)]
    with pytest.raises(ValueError, match=r"layers \[60, 61\] lie in 2 pools"):
        draft_subpage_view(derive(*apart, tokens_per_block=128), 32)


def test_b52_the_log_line_has_real_fields_and_nothing_probes_attributes() -> None:
    """Restated: a view that cannot be described fails; no default hides a field that is gone."""
    view = draft_subpage_view(derive(*DRAFTS, tokens_per_block=128), 32)
    assert view.describe() == (
        "draft subpage view active: draft_layers=[60, 61] subdiv=4 tokens_per_block=32"
    )
    probing = re.compile(r"getattr\([^()]*,[^()]*,|hasattr\(")
    for source in Path(kvcache_core.__file__).parent.rglob("*.py"):
        assert not probing.search(source.read_text()), source


def test_b55_unallocated_entries_are_the_first_page() -> None:
    view = draft_subpage_view(derive(*DRAFTS, tokens_per_block=128), 32)
    table = np.array([[3, -1, -1], [-1, -1, -1]], dtype=np.int32)
    for layer in (60, 61):
        for pages in (view.expand_keys(layer, table), view.expand_values(layer, table)):
            assert pages.shape == (2, 12)
            assert (pages[0, 4:] == 0).all()
            assert (pages[1] == 0).all()
            assert (pages >= 0).all()


def test_b56_a_batch_is_expanded_at_once() -> None:
    """256 rows of 512 blocks in one call, equal to row after row."""
    view = draft_subpage_view(derive(*DRAFTS, tokens_per_block=128), 32)
    rng = np.random.default_rng(1)
    table = rng.integers(-1, 9000, (256, 512), dtype=np.int32)
    pages = view.expand_keys(61, table)
    assert (pages.shape, pages.dtype) == ((256, 2048), np.dtype(np.int32))
    for row in (0, 100, 255):
        assert np.array_equal(pages[row], view.expand_keys(61, table[row]))
    for block in range(512):
        slot = int(table[7, block])
        expected = [0] * 4 if slot < 0 else [16 * slot + 8 + page for page in range(4)]
        assert pages[7, 4 * block : 4 * block + 4].tolist() == expected


def test_k19_index_kind_is_per_layer() -> None:
    """Raw slots for the target, pages for the drafter, slots for extra buffers of any layer."""
    specs = [
        attention(0, BF16, extra_buffers=(index_keys(100),)),
        draft(1, policy=OPTIONAL, index_kind=PER_LAYER),
        attention(2, window=100, index_kind=SHARED, extra_buffers=(index_keys(100),)),
    ]
    plan = derive(*specs)
    assert plan.index_space(0, KEY).kind is RAW
    assert plan.index_space(1, VALUE).kind is PER_LAYER
    assert plan.index_space(2, KEY).kind is SHARED
    assert plan.index_space(2, BufferRole.INDEX_KEY).kind is RAW
