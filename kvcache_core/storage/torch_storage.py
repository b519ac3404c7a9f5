"""Pools as torch tensors, on any device.

Each pool is one contiguous uint8 tensor ``[num_slots, slot_bytes]`` whose base is aligned to
PAGE_ALIGNMENT_BYTES. Every other tensor handed out is a strided view of it: nothing is copied, and
slot strides are the pool's real ones. Pools start zeroed, so that masked reads never meet a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from kvcache_core.address import PAGE_ALIGNMENT_BYTES, BufferAddress
from kvcache_core.layout import LayoutPlan
from kvcache_core.ports import PageCopier
from kvcache_core.spec import BufferRole, ElementType

TORCH_TYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
    ElementType.UINT8: torch.uint8,
    ElementType.PACKED4: torch.uint8,
}


def element_type_of(dtype: torch.dtype) -> ElementType:
    """The element type of a torch type. Raises ValueError for one that no cache can hold."""
    for element, known in TORCH_TYPES.items():
        if known is dtype:
            return element
    supported = [str(known) for known in TORCH_TYPES.values()]
    raise ValueError(f"no KV cache of {dtype}; expected one of {supported}")


class TorchStorage(PageCopier):
    """All pools of one rank. ``slots`` gives the slots of each pool group."""

    def __init__(
        self, plan: LayoutPlan, slots: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        if len(slots) != len(plan.pool_groups) or any(count < 1 for count in slots):
            raise ValueError(
                f"expected a positive slot count for each of {len(plan.pool_groups)} pool groups, "
                f"got {tuple(slots)}"
            )
        self.plan = plan
        self.slots = tuple(slots)
        self.device = torch.device(device)
        self._pools = tuple(
            tuple(_aligned_pool(count, slot_bytes, self.device) for slot_bytes in group.slot_bytes)
            for count, group in zip(slots, plan.pool_groups, strict=True)
        )

    def pool_bytes(self, pool_group: int, pool: int) -> torch.Tensor:
        """The pool itself: uint8 ``[num_slots, slot_bytes]``, contiguous."""
        return self._pools[pool_group][pool]

    def kv(self, layer_id: int) -> torch.Tensor:
        """Keys and values of a layer, a view ``[num_slots, kv_factor, heads, tokens, head_dim]``.

        With pages smaller than a block there is a page axis before the heads:
        ``[num_slots, kv_factor, pages_per_block, heads, tokens_per_page, head_dim]``. Packed 4-bit
        data comes as uint8 with ``head_dim // 2``. Raises KeyError for recurrent layers.
        """
        key = self.plan.address(layer_id, BufferRole.KEY)
        factor = self.plan.spec(layer_id).kv_factor
        distance = key.bytes
        if factor == 2:
            distance = self.plan.address(layer_id, BufferRole.VALUE).offset_bytes - key.offset_bytes
        return self._view(key, (factor, distance))

    def buffer(self, layer_id: int, role: BufferRole) -> torch.Tensor:
        """One buffer of a layer, a view ``[num_slots, (pages,) heads, tokens_per_page, elements]``.

        The page axis is there only when a block has several pages; states have no token axis.
        """
        return self._view(self.plan.address(layer_id, role), None)

    def _view(self, address: BufferAddress, factor: tuple[int, int] | None) -> torch.Tensor:
        geometry = address.geometry
        dtype = TORCH_TYPES[geometry.dtype]
        size = dtype.itemsize
        elements = geometry.dtype.bytes_of(geometry.elements_per_head) // size
        pool = self._pools[address.pool_group][address.pool]
        shape = [pool.shape[0]]
        strides = [address.slot_bytes // size]
        if factor is not None:
            shape.append(factor[0])
            strides.append(factor[1] // size)
        if geometry.pages_per_block > 1:
            shape.append(geometry.pages_per_block)
            strides.append(geometry.page_stride_bytes // size)
        tokens = geometry.tokens_per_page
        shape.append(geometry.num_heads)
        strides.append(max(tokens, 1) * elements)
        if tokens:
            shape.append(tokens)
            strides.append(elements)
        shape.append(elements)
        strides.append(1)
        typed = pool.view(dtype)
        offset = typed.storage_offset() + address.offset_bytes // size
        return typed.as_strided(shape, strides, offset)

    @override
    def copy_slot(self, pool_group: int, source: int, target: int) -> None:
        for pool in self._pools[pool_group]:
            pool[target].copy_(pool[source])
        if self.device.type == "cuda":
            # A transfer that is posted next is not ordered behind this stream.
            torch.cuda.current_stream(self.device).synchronize()


def _aligned_pool(num_slots: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """A zeroed pool whose first byte is aligned, whatever the allocator gives."""
    total = num_slots * slot_bytes
    raw = torch.zeros(total + PAGE_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % PAGE_ALIGNMENT_BYTES
    return raw[start : start + total].view(num_slots, slot_bytes)
