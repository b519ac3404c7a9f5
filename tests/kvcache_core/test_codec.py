"""K13 and B6: what the host tier keeps of a slot, and the element type it goes by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole, ElementType, KVCacheLayerSpec, recurrent_layer
from kvcache_core.storage import NarrowingCodec
from kvcache_core.storage.codec import uniform_dtype
from kvcache_core.storage.types import TORCH_TYPES
from tests.kvcache_core.storage_rig import (
    CONV,
    INDEX_KEY,
    RECURRENT,
    SLOTS,
    TARGET,
    Rig,
    as_bytes,
    attention,
)
from tests.support.devices import DEVICES, usable

HOST_SLOTS = 5
SCALE = 1.5
PAIRS = [
    (ElementType.FLOAT32, ElementType.BFLOAT16, 2.0**-8),
    (ElementType.FLOAT32, ElementType.FLOAT16, 2.0**-11),
    (ElementType.FLOAT32, ElementType.FLOAT8_E4M3, 2.0**-4),
    (ElementType.BFLOAT16, ElementType.FLOAT8_E4M3, 2.0**-3.9),
    (ElementType.FLOAT16, ElementType.FLOAT8_E4M3, 2.0**-3.9),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def slots(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


def layers(dtype: ElementType) -> list[KVCacheLayerSpec]:
    """Target and draft layers of one type in two pool groups."""
    return [attention(0, dtype), attention(1, dtype), attention(10, dtype, head_dim=40, window=9)]


@pytest.mark.parametrize(("dtype", "stored", "error"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_k13_cold_pages_come_back_within_the_narrow_type(
    dtype: ElementType, stored: ElementType, error: float, scale: float, device: str
) -> None:
    specs = layers(dtype)
    plan = LayoutPlan.derive(specs, tokens_per_block=8)
    codec = NarrowingCodec.of(specs, stored, scale)
    rig = Rig(plan, device, host_slots=[HOST_SLOTS] * len(plan.pool_groups), codec=codec)
    ratio = dtype.bits // stored.bits
    for spec in specs:
        address = plan.address(spec.layer_id, BufferRole.KEY)
        group = address.pool_group
        host = rig.storage.host_pool_bytes(group, 0)
        assert host.shape == (HOST_SLOTS, address.slot_bytes // ratio)
        kv = rig.storage.kv(spec.layer_id)
        values = torch.randn(3, *kv.shape[1:], generator=torch.Generator().manual_seed(1))
        kv[[1, 6, 3]] = values.to(kv)
        rig.storage.demote_slots(group, slots(1, 6, 3), slots(4, 0, 2))
        original = kv[[1, 6, 3]].float().clone()
        kv.zero_()
        rig.storage.onboard_slots(group, slots(2, 4, 0), slots(6, 2, 5))
        restored = kv[[2, 5, 6]].float()
        floor = 0.01 if stored is ElementType.FLOAT8_E4M3 else 1e-6
        assert torch.allclose(restored, original, rtol=error, atol=floor)
        assert kv[[0, 1, 3, 4]].float().abs().sum() == 0


@pytest.mark.parametrize(("dtype", "stored", "error"), PAIRS)
def test_k13_encoding_is_value_over_scale(
    dtype: ElementType, stored: ElementType, error: float
) -> None:
    """The stored number itself is checked: a reciprocal cancels out in a round trip."""
    codec = NarrowingCodec(dtype, stored, SCALE)
    values = torch.tensor([[3.0, -1.5, 12.0, 0.0, 6.0, 1.5, -24.0, 0.75] * 4])
    pages = values.to(TORCH_TYPES[dtype]).view(torch.uint8)
    encoded = codec.encode(pages)
    assert encoded.shape == (1, codec.encoded_bytes(pages.shape[1]))
    assert torch.equal(encoded.view(TORCH_TYPES[stored]).float(), values / SCALE)
    assert torch.equal(codec.decode(encoded), pages)
    assert error < 1


@pytest.mark.parametrize(("dtype", "stored", "error"), PAIRS)
def test_k13_values_out_of_range_saturate_and_nan_stays(
    dtype: ElementType, stored: ElementType, error: float
) -> None:
    del error
    codec = NarrowingCodec(dtype, stored)
    kind = TORCH_TYPES[dtype]
    largest = torch.finfo(kind).max
    pages = torch.tensor([[largest, -largest, float("nan"), 1.0]], dtype=kind).view(torch.uint8)
    restored = codec.decode(codec.encode(pages)).view(kind).float()
    limit = min(largest, torch.finfo(TORCH_TYPES[stored]).max)
    assert restored[0, 0] == limit
    assert restored[0, 1] == -limit
    assert restored[0, 2].isnan()
    assert restored[0, 3] == 1.0


def test_k13_without_a_codec_bytes_are_identical(device: str) -> None:
    plan = LayoutPlan.derive(layers(ElementType.FLOAT16), tokens_per_block=8)
    rig = Rig(plan, device, host_slots=[HOST_SLOTS] * len(plan.pool_groups))
    rig.fill()
    before = rig.snapshot()
    for group in plan.pool_groups:
        rig.storage.demote_slots(group.id, slots(1, SLOTS - 1), slots(HOST_SLOTS - 1, 1))
        rig.storage.onboard_slots(group.id, slots(1, HOST_SLOTS - 1), slots(3, 4))
        after = rig.snapshot()[group.id]
        for pool, old in enumerate(before[group.id]):
            assert torch.equal(after[pool][[3, 4]], old[[SLOTS - 1, 1]])
            host = rig.storage.host_pool_bytes(group.id, pool)
            assert torch.equal(host[HOST_SLOTS - 1], old[1].cpu())
            assert host[[0, 2, 3]].sum() == 0


@pytest.mark.parametrize(
    ("specs", "first", "second"),
    [
        (
            [attention(0, ElementType.BFLOAT16), attention(10, ElementType.FLOAT8_E4M3)],
            r"bfloat16 \(layer 0 key\)",
            r"float8_e4m3 \(layer 10 key\)",
        ),
        (
            [attention(0, ElementType.FLOAT16, extra_buffers=(INDEX_KEY,))],
            r"float16 \(layer 0 key\)",
            r"bfloat16 \(layer 0 index_key\)",
        ),
        (
            [recurrent_layer(3, TARGET, [CONV, RECURRENT])],
            r"float16 \(layer 3 conv_state\)",
            r"float32 \(layer 3 recurrent_state\)",
        ),
    ],
)
def test_k13_mixed_types_are_refused(
    specs: list[KVCacheLayerSpec], first: str, second: str
) -> None:
    with pytest.raises(ValueError, match=f"one element type, got {first} and {second}"):
        NarrowingCodec.of(specs, ElementType.FLOAT8_E4M3)


@pytest.mark.parametrize("dtype", [ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16])
def test_b6_the_type_comes_from_the_specs(dtype: ElementType) -> None:
    """The codec once used a type of the manager's, and bf16 pages were read as fp16."""
    specs = layers(dtype)
    assert uniform_dtype(specs) is dtype
    codec = NarrowingCodec.of(specs, ElementType.FLOAT8_E4M3)
    assert codec.dtype is dtype
    kind = TORCH_TYPES[dtype]
    pages = torch.tensor([[1.5, -3.0, 0.25, 8.0]], dtype=kind)
    assert torch.equal(codec.decode(codec.encode(as_bytes(pages)[None])).view(kind), pages)


@pytest.mark.parametrize(
    ("dtype", "stored", "scale", "message"),
    [
        (ElementType.FLOAT8_E4M3, ElementType.FLOAT8_E4M3, 1.0, "expected pages of one of"),
        (ElementType.PACKED4, ElementType.FLOAT8_E4M3, 1.0, "got packed4"),
        (ElementType.FLOAT16, ElementType.BFLOAT16, 1.0, "narrower type than float16"),
        (ElementType.FLOAT32, ElementType.UINT8, 1.0, "got uint8"),
        (ElementType.FLOAT32, ElementType.FLOAT16, 0.0, "positive scale"),
    ],
)
def test_k13_impossible_codecs_are_refused(
    dtype: ElementType, stored: ElementType, scale: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NarrowingCodec(dtype, stored, scale)
