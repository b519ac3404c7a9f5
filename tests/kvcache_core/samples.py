"""Layer specs and small layouts for the tests of the plan. Nothing here knows a manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache_core.address import BufferAddress
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
    recurrent_layer,
)

TARGET, DRAFT = KVCacheLayerOwner.TARGET, KVCacheLayerOwner.DRAFT
REQUIRED, OPTIONAL, PRIVATE = ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE
BF16, FP8, FP32, PACKED4 = (
    ElementType.BFLOAT16,
    ElementType.FLOAT8_E4M3,
    ElementType.FLOAT32,
    ElementType.PACKED4,
)
KEY, VALUE = BufferRole.KEY, BufferRole.VALUE
GIB = 1 << 30


def attention(
    layer_id: int, dtype: ElementType = BF16, heads: int = 1, head_dim: int = 64, **fields: Any
) -> KVCacheLayerSpec:
    """An attention layer of the target unless ``fields`` say otherwise."""
    return KVCacheLayerSpec(
        layer_id=layer_id,
        owner=fields.pop("owner", TARGET),
        dtype=dtype,
        num_kv_heads=heads,
        head_dim=head_dim,
        **fields,
    )


def draft(
    layer_id: int, dtype: ElementType = BF16, heads: int = 1, head_dim: int = 64, **fields: Any
) -> KVCacheLayerSpec:
    """An attention layer of the drafter."""
    return attention(layer_id, dtype, heads, head_dim, owner=DRAFT, **fields)


def packed(layer_id: int, heads: int = 1, head_dim: int = 64, **fields: Any) -> KVCacheLayerSpec:
    """A packed 4-bit layer, one scale for sixteen elements."""
    return attention(layer_id, PACKED4, heads, head_dim, scale_block_elements=16, **fields)


def index_keys(elements: int = 128, dtype: ElementType = BF16) -> BufferSpec:
    """The extra buffer of a sparse layer."""
    return BufferSpec(
        role=BufferRole.INDEX_KEY,
        dtype=dtype,
        num_heads=1,
        elements_per_head=elements,
        mapping=PageMapping.REPLICATED,
    )


def states(layer_id: int, elements: int = 48, **fields: Any) -> KVCacheLayerSpec:
    """A recurrent layer of two heads of ``elements`` float32."""
    state = BufferSpec(
        role=BufferRole.RECURRENT_STATE, dtype=FP32, num_heads=2, elements_per_head=elements
    )
    return replace(recurrent_layer(layer_id, TARGET, [state]), **fields)


def derive(
    *specs: KVCacheLayerSpec, tokens_per_block: int = 64, longest: int | None = None
) -> LayoutPlan:
    """The plan of these layers."""
    return LayoutPlan.derive(specs, tokens_per_block=tokens_per_block, max_sequence_tokens=longest)


class Pools:
    """Real memory for a plan, as numpy bytes; odd slot counts by default."""

    def __init__(self, plan: LayoutPlan, slots: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.slots = tuple(slots) if slots is not None else (7,) * len(plan.pool_groups)
        self.pools = [
            [np.zeros(count * size, dtype=np.uint8) for size in group.slot_bytes]
            for count, group in zip(self.slots, plan.pool_groups, strict=True)
        ]

    @property
    def bases(self) -> list[list[int]]:
        """Addresses of all pools."""
        return [[pool.ctypes.data for pool in pools] for pools in self.pools]

    def slot_view(self, address: BufferAddress) -> npt.NDArray[np.uint8]:
        """A buffer over all slots, ``[slots, bytes]``, by strides, not by the address rule."""
        pool = self.pools[address.pool_group][address.pool]
        rows = pool.reshape(self.slots[address.pool_group], address.slot_bytes)
        return rows[:, address.offset_bytes : address.offset_bytes + address.bytes]

    def at(self, address: BufferAddress, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` bytes at an offset of the buffer's pool."""
        return self.pools[address.pool_group][address.pool][offset : offset + count]


GEMMA = tuple(
    attention(index, BF16, 1, 256, window=None if index % 6 == 5 else 512) for index in range(26)
)
"""One full layer in six, 22 with a window."""

LAYOUTS: dict[str, tuple[KVCacheLayerSpec, ...]] = {
    "full": (attention(0), attention(1)),
    "window in the same pool group": (attention(0), attention(1, window=96)),
    "window in its own": (attention(0, heads=3), attention(1, window=96), attention(2, window=96)),
    "sinks": (attention(0), attention(1, window=96, sink_tokens=80)),
    "windows only": (attention(0, window=100), attention(1, window=200)),
    "hybrid": (attention(0, heads=2), states(1), draft(2, policy=OPTIONAL)),
    "windowed draft": (
        *(attention(layer, heads=4) for layer in range(3)),
        draft(3, heads=2, window=130, policy=OPTIONAL),
    ),
    "packed and key-only": (packed(0, 2), attention(1, kv_factor=1, head_dim=96), draft(2, FP8)),
}
