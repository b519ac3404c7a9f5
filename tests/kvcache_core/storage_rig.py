"""Layers of every kind, their storage, and a reader of memory that only knows the address rule."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvcache_core.address import BufferAddress
from kvcache_core.layout import LayoutPlan
from kvcache_core.pointer_table import pool_pointers
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
from kvcache_core.storage import TorchStorage

TARGET, DRAFT = KVCacheLayerOwner.TARGET, KVCacheLayerOwner.DRAFT
SLOTS = 7
ODD_SLOTS = (1, 3, SLOTS - 1)
BLOCK = 8
FIRST_DRAFT_LAYER = 10

INDEX_KEY = BufferSpec(
    role=BufferRole.INDEX_KEY,
    dtype=ElementType.BFLOAT16,
    num_heads=1,
    elements_per_head=24,
    mapping=PageMapping.REPLICATED,
)
CONV = BufferSpec(
    role=BufferRole.CONV_STATE,
    dtype=ElementType.FLOAT16,
    num_heads=1,
    elements_per_head=12,
    mapping=PageMapping.SECTIONED,
    sections=(8, 3, 1),
)
RECURRENT = BufferSpec(
    role=BufferRole.RECURRENT_STATE,
    dtype=ElementType.FLOAT32,
    num_heads=3,
    elements_per_head=20,
)


def attention(layer_id: int, dtype: ElementType, **changes: Any) -> KVCacheLayerSpec:
    """An attention layer; layers from FIRST_DRAFT_LAYER on are the drafter's."""
    fields: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, **changes}
    owner = DRAFT if layer_id >= FIRST_DRAFT_LAYER else TARGET
    return KVCacheLayerSpec(layer_id=layer_id, owner=owner, dtype=dtype, **fields)


def every_kind() -> LayoutPlan:
    """fp8, bf16, fp32, packed 4-bit and scales, key-only, index-K, states, small pages, windows."""
    return LayoutPlan.derive(
        [
            attention(0, ElementType.BFLOAT16),
            attention(1, ElementType.FLOAT16, extra_buffers=(INDEX_KEY,)),
            attention(2, ElementType.FLOAT8_E4M3, kv_factor=1, num_kv_heads=1, head_dim=40),
            attention(3, ElementType.PACKED4, scale_block_elements=8, head_dim=32),
            attention(4, ElementType.PACKED4, scale_block_elements=8, head_dim=32),
            attention(5, ElementType.FLOAT8_E4M3),
            recurrent_layer(6, TARGET, [CONV, RECURRENT]),
            recurrent_layer(7, TARGET, [CONV, RECURRENT]),
            attention(10, ElementType.BFLOAT16, tokens_per_page=4, window=9),
            attention(11, ElementType.FLOAT32, window=9),
            attention(12, ElementType.FLOAT8_E4M3, policy=ReusePolicy.OPTIONAL),
        ],
        tokens_per_block=BLOCK,
    )


class Rig:
    """Storage of one plan with seven slots a pool group, so that the last slot is even and odd
    slots are in the middle.
    """

    def __init__(self, plan: LayoutPlan, device: str = "cpu", **options: Any) -> None:
        self.plan = plan
        self.storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups), device, **options)
        self.pointers = pool_pointers(plan, self.storage.pool_bases())
        self._random = torch.Generator().manual_seed(7)

    def address_of(self, address: BufferAddress, slot: int) -> int:
        """``base + slot * slot_bytes + offset`` of a buffer, from the pointer table."""
        groups = self.plan.pool_groups[: address.pool_group]
        row = sum(len(group.slot_bytes) for group in groups) + address.pool
        base, slot_bytes = self.pointers[row].tolist()
        return int(base + slot * slot_bytes + address.offset_bytes)

    def page(self, address: BufferAddress, slot: int, page: int = 0) -> torch.Tensor:
        """The bytes of one page in raw memory, uint8 ``[page_bytes]``, writable. CPU only."""
        start = self.address_of(address, slot) + page * address.geometry.page_stride_bytes
        raw = (ctypes.c_ubyte * address.geometry.page_bytes).from_address(start)
        return torch.frombuffer(raw, dtype=torch.uint8)

    def random_bytes(self, count: int) -> torch.Tensor:
        """uint8 ``[count]``; the same ones in every run."""
        return torch.randint(0, 256, (count,), generator=self._random, dtype=torch.uint8)

    def fill(self) -> None:
        """Random bytes in all device pools."""
        for group in self.plan.pool_groups:
            for number in range(len(group.slot_bytes)):
                pool = self.storage.pool_bytes(group.id, number)
                pool.copy_(self.random_bytes(pool.numel()).view(pool.shape))

    def snapshot(self) -> list[list[torch.Tensor]]:
        """Copies of all device pools."""
        return [
            [
                self.storage.pool_bytes(group.id, pool).cpu().clone()
                for pool in range(len(group.slot_bytes))
            ]
            for group in self.plan.pool_groups
        ]


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view in its logical order, uint8 ``[n]``."""
    return view.contiguous().flatten().view(torch.uint8)
