"""Addresses and views on real memory, odd slots and the last one included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcache_core.index_space import IndexKind, IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
    recurrent_layer,
)
from kvcache_core.storage import TorchStorage
from kvcache_core.storage.types import TORCH_TYPES, element_type_of
from tests.kvcache_core.storage_rig import INDEX_KEY, TARGET, attention
from tests.support.devices import DEVICES, usable

SLOTS = 7


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def two_pool_groups() -> LayoutPlan:
    layers = [attention(0, ElementType.FLOAT32), attention(1, ElementType.FLOAT32, window=9)]
    wider = KVCacheLayerSpec(**{**vars(layers[1]), "head_dim": 24})
    return LayoutPlan.derive([layers[0], wider], tokens_per_block=8)


def slot_array(*slots: int) -> npt.NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


def mixed_plan() -> LayoutPlan:
    conv = BufferSpec(
        role=BufferRole.CONV_STATE,
        dtype=ElementType.FLOAT16,
        num_heads=1,
        elements_per_head=12,
        mapping=PageMapping.SECTIONED,
        sections=(8, 4),
    )
    with_index = KVCacheLayerSpec(
        **{**vars(attention(1, ElementType.FLOAT16)), "extra_buffers": (INDEX_KEY,)}
    )
    specs = [
        attention(0, ElementType.BFLOAT16),
        with_index,
        attention(2, ElementType.FLOAT8_E4M3, kv_factor=1, num_kv_heads=1, head_dim=40),
        attention(3, ElementType.PACKED4, scale_block_elements=8, head_dim=32),
        attention(10, ElementType.FLOAT32, window=8),
        attention(11, ElementType.BFLOAT16, tokens_per_page=4, policy=ReusePolicy.OPTIONAL),
        recurrent_layer(12, TARGET, [conv]),
    ]
    return LayoutPlan.derive(specs, tokens_per_block=8)


def test_each_page_lies_where_its_address_says(device: str) -> None:
    plan = mixed_plan()
    storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups), device)
    for number, ((layer_id, role), address) in enumerate(plan.addresses.items(), start=1):
        view = storage.buffer(layer_id, role)
        geometry = address.geometry
        pool = storage.pool_bytes(address.pool_group, address.pool)
        for slot in (0, 1, 3, SLOTS - 1):
            pool.zero_()
            pages = view[slot] if geometry.pages_per_block > 1 else view[slot].unsqueeze(0)
            assert len(pages) == geometry.pages_per_block
            for page, data in enumerate(pages):
                data.copy_(torch.full(data.shape, float(number % 7 + 1)).to(data))
                raw = data.contiguous().view(torch.uint8).flatten()
                start = address.byte_offset(slot, page)
                flat = pool.flatten()[start : start + geometry.page_bytes]
                assert torch.equal(flat, raw)
                assert len(raw) == geometry.page_bytes
            assert int((pool.sum(dim=1) > 0).sum()) == 1
            written = geometry.page_bytes * geometry.pages_per_block
            assert int((pool != 0).sum()) <= written


def test_index_spaces_address_the_views() -> None:
    plan = mixed_plan()
    storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups))
    for (layer_id, role), address in plan.addresses.items():
        view = storage.buffer(layer_id, role)
        base = storage.pool_bytes(address.pool_group, address.pool).data_ptr()
        for kind in IndexKind:
            try:
                space = IndexSpace.of(address, kind)
            except ValueError:
                continue
            for slot in (1, SLOTS - 1):
                index = slot * space.scale + space.bias
                assert base + space.byte_offset(index) == view[slot].data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [
        ElementType.FLOAT32,
        ElementType.BFLOAT16,
        ElementType.FLOAT16,
        ElementType.FLOAT8_E4M3,
    ],
)
def test_kv_is_a_view_of_the_pool(dtype: ElementType, device: str) -> None:
    plan = LayoutPlan.derive([attention(0, dtype), attention(1, dtype)], tokens_per_block=8)
    storage = TorchStorage(plan, [SLOTS], device)
    kv = storage.kv(1)
    assert kv.shape == (SLOTS, 2, 2, 8, 16)
    assert kv.dtype is TORCH_TYPES[dtype]
    assert element_type_of(kv.dtype) is dtype
    assert storage.pool_bytes(0, 0).is_contiguous()
    assert storage.pool_bytes(0, 0).data_ptr() % 64 == 0
    value = storage.buffer(1, BufferRole.VALUE)
    kv[SLOTS - 1, 1] = torch.ones(2, 8, 16).to(kv)
    assert value[SLOTS - 1].float().sum() == 2 * 8 * 16
    assert storage.kv(0).float().sum() == 0
    assert kv[SLOTS - 1, 1].data_ptr() == value[SLOTS - 1].data_ptr()


def test_kv_shapes_of_special_layers() -> None:
    plan = mixed_plan()
    storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups))
    assert storage.kv(2).shape == (SLOTS, 1, 1, 8, 40)
    assert storage.kv(3).shape == (SLOTS, 2, 2, 8, 16)
    assert storage.kv(3).dtype is torch.uint8
    assert storage.kv(11).shape == (SLOTS, 2, 2, 2, 4, 16)
    assert storage.buffer(12, BufferRole.CONV_STATE).shape == (SLOTS, 1, 12)
    with pytest.raises(KeyError, match="layer 12 has no key buffer"):
        storage.kv(12)


def test_wrong_counts_and_types_are_refused() -> None:
    plan = two_pool_groups()
    with pytest.raises(ValueError, match=r"positive slot count for each of 2 pool groups, got \(4"):
        TorchStorage(plan, [4])
    with pytest.raises(ValueError, match=r"got \(4, 0\)"):
        TorchStorage(plan, [4, 0])
    with pytest.raises(ValueError, match=r"host slot count .* each of 2 pool groups, got \(1"):
        TorchStorage(plan, [4, 4], host_slots=[1])
    with pytest.raises(ValueError, match=r"no KV cache of torch\.int64"):
        element_type_of(torch.int64)


def test_host_pools_exist_only_where_they_are_asked_for() -> None:
    plan = two_pool_groups()
    storage = TorchStorage(plan, [4, 4])
    assert storage.host_slots == (0, 0)
    assert storage.host_pool_bytes(1, 0).shape[0] == 0
    storage = TorchStorage(plan, [4, 4], host_slots=[0, 3])
    assert storage.host_pool_bytes(0, 0).shape[0] == 0
    assert storage.host_pool_bytes(1, 0).shape == (3, plan.pool_groups[1].slot_bytes[0])
    assert storage.host_pool_bytes(1, 0).data_ptr() % 64 == 0
    with pytest.raises(ValueError, match=r"host slots within 0\.\.-1"):
        storage.onboard_slots(0, slot_array(0), slot_array(0))
