"""K7, K9, K10, K33 and B4, B7, B33, B48 on real memory: each byte that a view writes is read back
at ``base + slot * slot_bytes + offset``, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcache_core.address import BufferAddress
from kvcache_core.index_space import IndexKind, IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.pointer_table import per_layer_pointers
from kvcache_core.spec import BufferRole, BufferSpec, ElementType, PageMapping, owner_of
from tests.kvcache_core.storage_rig import (
    BLOCK,
    CONV,
    DRAFT,
    FIRST_DRAFT_LAYER,
    ODD_SLOTS,
    SLOTS,
    Rig,
    as_bytes,
    attention,
    every_kind,
)
from tests.support.packed4 import dequantize, quantize

KEY, VALUE = BufferRole.KEY, BufferRole.VALUE
SCALE = 1.5


@pytest.fixture
def rig() -> Rig:
    return Rig(every_kind())


def check_both_ways(rig: Rig, address: BufferAddress, view: torch.Tensor) -> None:
    """``view`` ``[num_slots, (pages,) ...]`` and raw memory agree in odd slots and the last one."""
    pages = address.geometry.pages_per_block
    for slot in ODD_SLOTS:
        for page in range(pages):
            part = view[slot, page] if pages > 1 else view[slot]
            written = rig.random_bytes(address.geometry.page_bytes)
            part.copy_(written.view(part.dtype).view(part.shape))
            assert torch.equal(rig.page(address, slot, page), written)
            read = rig.random_bytes(address.geometry.page_bytes)
            rig.page(address, slot, page).copy_(read)
            assert torch.equal(as_bytes(part), read)


def test_k9_views_use_the_real_slot_stride(rig: Rig) -> None:
    """Every buffer of every kind of layer, draft layers included."""
    for (layer_id, role), address in rig.plan.addresses.items():
        view = rig.storage.buffer(layer_id, role)
        assert view.stride(0) * view.element_size() == address.slot_bytes
        check_both_ways(rig, address, view)


def test_k9_a_write_stays_inside_its_buffer(rig: Rig) -> None:
    for (layer_id, role), address in rig.plan.addresses.items():
        rig.fill()
        before = rig.snapshot()
        view = rig.storage.buffer(layer_id, role)[SLOTS - 1]
        flipped = ~as_bytes(view)
        view.copy_(flipped.view(view.dtype).view(view.shape))
        changed = {
            (group, pool): (new != before[group][pool]).nonzero()
            for group, pools in enumerate(rig.snapshot())
            for pool, new in enumerate(pools)
        }
        where = changed.pop((address.pool_group, address.pool))
        assert all(len(rest) == 0 for rest in changed.values())
        assert len(where) == address.geometry.page_bytes * address.geometry.pages_per_block
        assert set(where[:, 0].tolist()) == {SLOTS - 1}
        start, end = address.offset_bytes, address.offset_bytes + address.bytes
        assert start <= int(where[:, 1].min()) <= int(where[:, 1].max()) < end


def test_b7_odd_slots_of_coalesced_buffers_are_their_own(rig: Rig) -> None:
    """A stride of one layer's bytes instead of the slot's puts odd slots into other layers."""
    shared = 0
    written: dict[tuple[int, int], torch.Tensor] = {}
    for spec in rig.plan.specs:
        if spec.is_recurrent:
            continue
        address = rig.plan.address(spec.layer_id, KEY)
        shared += address.slot_bytes > spec.kv_factor * address.bytes
        kv = rig.storage.kv(spec.layer_id)
        for slot in range(SLOTS):
            data = rig.random_bytes(kv[slot].nbytes)
            kv[slot].copy_(data.view(kv.dtype).view(kv[slot].shape))
            written[spec.layer_id, slot] = data
    assert shared >= 2, "no two layers share a slot: nothing is tested"
    for (layer_id, slot), data in written.items():
        assert torch.equal(as_bytes(rig.storage.kv(layer_id)[slot]), data), (layer_id, slot)


def test_k7_packed_data_and_scales_lie_in_two_pools_under_one_index(rig: Rig) -> None:
    data, scale = rig.plan.address(4, KEY), rig.plan.address(4, BufferRole.KEY_SCALE)
    assert (data.pool_group, data.layer_group) == (scale.pool_group, scale.layer_group)
    assert data.pool != scale.pool
    values = torch.randn(2, 2, BLOCK, 32, generator=torch.Generator().manual_seed(3))
    for slot in ODD_SLOTS:
        for part, (role, scale_role) in enumerate(
            [(KEY, BufferRole.KEY_SCALE), (VALUE, BufferRole.VALUE_SCALE)]
        ):
            packed, factors = quantize(values[part] * (slot + 1), 8, SCALE)
            rig.storage.kv(4)[slot, part].copy_(packed)
            rig.storage.buffer(4, scale_role)[slot].copy_(factors)
            raw = rig.page(rig.plan.address(4, role), slot).view(2, BLOCK, 16)
            raw_factors = rig.page(rig.plan.address(4, scale_role), slot).view(2, BLOCK, 4)
            restored = dequantize(raw, raw_factors, 8, SCALE)
            error = (restored / (slot + 1) - values[part]).abs().max()
            assert error < 0.25 * values.abs().max()
            assert torch.equal(restored, dequantize(packed, factors, 8, SCALE))


def test_k7_the_packed_reference_keeps_a_scale_that_is_no_power_of_two() -> None:
    exact = torch.tensor([[1.5, -3.0, 4.5, 9.0, -0.75, 0.0, 2.25, 6.0]])
    packed, factors = quantize(exact, 8, SCALE)
    assert packed.shape == (1, 4)
    assert torch.equal(dequantize(packed, factors, 8, SCALE), exact)
    assert not torch.equal(dequantize(packed, factors, 8, 1 / SCALE), exact)


def test_k10_the_pointer_table_gives_real_addresses(rig: Rig) -> None:
    for (layer_id, role), address in rig.plan.addresses.items():
        view = rig.storage.buffer(layer_id, role)
        for slot in ODD_SLOTS:
            assert rig.address_of(address, slot) == view[slot].data_ptr()


def test_k10_the_table_of_layers_gives_real_addresses(rig: Rig) -> None:
    """The mixed layout: each layer and pool has a pointer of its own, draft layers included."""
    table = per_layer_pointers(rig.plan, rig.pointers)
    found: set[tuple[int, BufferRole]] = set()
    for row, layer_id in enumerate(rig.plan.layer_ids):
        for pool, (base, slot_bytes) in enumerate(table[row].tolist()):
            roles = [
                role
                for (layer, role), address in rig.plan.addresses.items()
                if layer == layer_id and address.pool == pool
            ]
            assert bool(base) is bool(roles)
            for slot in ODD_SLOTS:
                starts = [rig.storage.buffer(layer_id, role)[slot].data_ptr() for role in roles]
                assert not starts or base + slot * slot_bytes == min(starts)
            found.update((layer_id, role) for role in roles)
    assert found == set(rig.plan.addresses)


def check_through_indices(rig: Rig, layer_id: int, role: BufferRole, kind: IndexKind) -> None:
    """Allocation, then index, then address, then the layer's own view."""
    address = rig.plan.address(layer_id, role)
    space = IndexSpace.of(address, kind)
    pages = space.pages_per_block
    view = rig.storage.buffer(layer_id, role)
    base = rig.storage.pool_bytes(address.pool_group, address.pool).data_ptr()
    indices = space.expand(np.array(ODD_SLOTS, dtype=np.int32))
    for number, index in enumerate(indices.tolist()):
        slot, page = ODD_SLOTS[number // pages], number % pages
        assert index < space.upper_bound(SLOTS)
        assert space.slot_of(index) == slot
        part = view[slot, page] if pages > 1 else view[slot]
        assert base + space.byte_offset(index) == part.data_ptr()
    check_both_ways(rig, address, view)


@pytest.mark.parametrize("kind", list(IndexKind))
def test_b4_key_only_beside_keys_and_values(kind: IndexKind) -> None:
    """Equal page sizes: the key-only layer shares the slot, and its index keeps its own factor."""
    plan = LayoutPlan.derive(
        [
            attention(0, ElementType.BFLOAT16),
            attention(1, ElementType.BFLOAT16, kv_factor=1),
            attention(2, ElementType.BFLOAT16),
        ],
        tokens_per_block=BLOCK,
    )
    rig = Rig(plan)
    assert plan.address(1, KEY).slot_bytes == 5 * plan.address(1, KEY).bytes
    assert rig.storage.kv(1).shape == (SLOTS, 1, 2, BLOCK, 16)
    for layer_id, role in plan.addresses:
        check_through_indices(rig, layer_id, role, kind)
    value = rig.storage.buffer(2, VALUE)
    assert rig.storage.kv(2)[SLOTS - 1, 1].data_ptr() == value[SLOTS - 1].data_ptr()


@pytest.mark.parametrize("kind", list(IndexKind))
def test_b48_a_third_buffer_of_the_same_size_in_the_slot(kind: IndexKind) -> None:
    """Index keys as large as keys and values: the stride is three pages, not two."""
    index = BufferSpec(
        role=BufferRole.INDEX_KEY,
        dtype=ElementType.BFLOAT16,
        num_heads=2,
        elements_per_head=16,
        mapping=PageMapping.REPLICATED,
    )
    layers = [attention(n, ElementType.BFLOAT16, extra_buffers=(index,)) for n in (0, 1)]
    plan = LayoutPlan.derive(layers, tokens_per_block=BLOCK)
    rig = Rig(plan)
    assert plan.address(1, KEY).slot_bytes == 6 * plan.address(1, KEY).bytes
    for layer_id, role in plan.addresses:
        check_through_indices(rig, layer_id, role, kind)


def test_b33_the_draft_pool_has_its_own_base_and_scale(rig: Rig) -> None:
    """Draft layers lie in pools of their own here; their tables must not use the target's."""
    target_groups = {rig.plan.address(n, KEY).pool_group for n in (0, 1, 2, 3, 4, 5)}
    checked = 0
    for (layer_id, role), address in rig.plan.addresses.items():
        if owner_of(rig.plan.specs, layer_id) is not DRAFT:
            continue
        assert layer_id >= FIRST_DRAFT_LAYER
        for kind in IndexKind:
            try:
                IndexSpace.of(address, kind)
            except ValueError:
                continue
            check_through_indices(rig, layer_id, role, kind)
            checked += 1
    assert checked >= 9
    windowed = rig.plan.address(10, KEY)
    assert windowed.pool_group not in target_groups
    assert windowed.geometry.pages_per_block == 2


def test_k33_state_views_take_raw_slots(rig: Rig) -> None:
    """Restated: kernels write a pending snapshot through the view, at the slot the manager gave."""
    conv, state = (
        rig.plan.address(7, role) for role in (BufferRole.CONV_STATE, BufferRole.RECURRENT_STATE)
    )
    assert conv.slot_bytes > conv.bytes, "two layers must share the slot"
    assert rig.storage.buffer(7, BufferRole.CONV_STATE).shape == (SLOTS, 1, 12)
    assert rig.storage.buffer(7, BufferRole.RECURRENT_STATE).shape == (SLOTS, 3, 20)
    for address, role in ((conv, BufferRole.CONV_STATE), (state, BufferRole.RECURRENT_STATE)):
        check_both_ways(rig, address, rig.storage.buffer(7, role))


def test_k33_sections_of_a_convolution_state_lie_where_the_geometry_says(rig: Rig) -> None:
    address = rig.plan.address(6, BufferRole.CONV_STATE)
    assert address.geometry.sections == CONV.sections
    pending = SLOTS - 1
    view = rig.storage.buffer(6, BufferRole.CONV_STATE)[pending, 0]
    start = 0
    for number, elements in enumerate(CONV.sections, start=1):
        view[start : start + elements] = number * SCALE
        raw = rig.page(address, pending).view(torch.float16)
        assert raw[start : start + elements].tolist() == [number * SCALE] * elements
        start += elements
    assert start == address.geometry.elements_per_head


def test_k33_a_snapshot_copies_the_whole_state_and_nothing_else(rig: Rig) -> None:
    rig.fill()
    before = rig.snapshot()
    address = rig.plan.address(6, BufferRole.CONV_STATE)
    live, pending = (np.array([slot], dtype=np.int32) for slot in (3, SLOTS - 1))
    rig.storage.copy_slots(address.pool_group, live, pending)
    for role in (BufferRole.CONV_STATE, BufferRole.RECURRENT_STATE):
        view = rig.storage.buffer(7, role)
        assert torch.equal(as_bytes(view[3]), as_bytes(view[SLOTS - 1]))
    kept = list(range(SLOTS - 1))
    for group, pools in enumerate(rig.snapshot()):
        for pool, new in enumerate(pools):
            rows = kept if group == address.pool_group else list(range(SLOTS))
            assert torch.equal(new[rows], before[group][pool][rows])


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (ElementType.FLOAT8_E4M3, lambda x: (x / SCALE).to(torch.float8_e4m3fn)),
        (ElementType.BFLOAT16, lambda x: (x / SCALE).to(torch.bfloat16)),
    ],
)
def test_b7_quantised_values_survive_at_odd_slots(
    dtype: ElementType, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Scale 1.5: a helper that multiplies instead of dividing shows."""
    rig = Rig(every_kind())
    layer_id = 5 if dtype is ElementType.FLOAT8_E4M3 else 0
    values = torch.randn(2, 2, BLOCK, 16, generator=torch.Generator().manual_seed(5))
    for slot in ODD_SLOTS:
        rig.storage.kv(layer_id)[slot].copy_(make(values))
        for part, role in enumerate((KEY, VALUE)):
            raw = rig.page(rig.plan.address(layer_id, role), slot).view(make(values).dtype)
            restored = raw.float().view(2, BLOCK, 16) * SCALE
            assert torch.allclose(restored, values[part], rtol=0.07, atol=0.01)
