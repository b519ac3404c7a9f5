"""Pools as torch tensors, on any device, and the host tier behind them.

Each pool is one contiguous uint8 tensor ``[num_slots, slot_bytes]`` (memory.py). Every other tensor
handed out is a strided view of it: nothing is copied, and slot strides are the pool's real ones.
Host pools mirror the device's, with slots of the size their codec gives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from kvcache_core.address import BufferAddress
from kvcache_core.layout import LayoutPlan
from kvcache_core.ports import PageCopier, SlotArray
from kvcache_core.spec import BufferRole
from kvcache_core.storage.codec import PageCodec
from kvcache_core.storage.memory import aligned_pool, pin
from kvcache_core.storage.row_copy import Rows, copy_rows
from kvcache_core.storage.types import TORCH_TYPES


class TorchStorage(PageCopier):
    """All pools of one rank.

    ``slots`` gives the device slots of each pool group, ``host_slots`` the host slots; left out,
    there is no host tier. Host pools are locked in memory where the device is CUDA. ``codec`` is
    what demoted slots go through; without one their bytes are identical. Copies run in the current
    stream of the calling thread, which must be the stream that writes the pages.
    """

    def __init__(
        self,
        plan: LayoutPlan,
        slots: Sequence[int],
        device: torch.device | str = "cpu",
        host_slots: Sequence[int] = (),
        codec: PageCodec | None = None,
    ) -> None:
        """Raises ValueError for wrong counts, MemoryError when host memory cannot be locked."""
        groups = plan.pool_groups
        host_slots = host_slots or (0,) * len(groups)
        if len(slots) != len(groups) or any(count < 1 for count in slots):
            raise ValueError(
                f"expected a positive slot count for each of {len(groups)} pool groups, "
                f"got {tuple(slots)}"
            )
        if len(host_slots) != len(groups) or any(count < 0 for count in host_slots):
            raise ValueError(
                f"expected a host slot count of at least 0 for each of {len(groups)} pool groups, "
                f"got {tuple(host_slots)}"
            )
        self.plan = plan
        self.slots = tuple(slots)
        self.host_slots = tuple(host_slots)
        self.device = torch.device(device)
        self._codec = codec
        self._pools = tuple(
            tuple(aligned_pool(count, slot_bytes, self.device) for slot_bytes in group.slot_bytes)
            for count, group in zip(slots, groups, strict=True)
        )
        self._host_pools = tuple(
            tuple(self._host_pool(count, slot_bytes) for slot_bytes in group.slot_bytes)
            for count, group in zip(host_slots, groups, strict=True)
        )

    def _host_pool(self, num_slots: int, slot_bytes: int) -> torch.Tensor:
        size = slot_bytes if self._codec is None else self._codec.encoded_bytes(slot_bytes)
        pool = aligned_pool(num_slots, size, torch.device("cpu"))
        if self.device.type == "cuda" and num_slots:
            weakref.finalize(self, pin(pool))
        return pool

    def pool_bytes(self, pool_group: int, pool: int) -> torch.Tensor:
        """The pool itself: uint8 ``[num_slots, slot_bytes]``, contiguous."""
        return self._pools[pool_group][pool]

    def pool_bases(self) -> tuple[tuple[int, ...], ...]:
        """Address of the first byte of every pool, by pool group: for a pointer table."""
        return tuple(tuple(pool.data_ptr() for pool in pools) for pools in self._pools)

    def host_pool_bytes(self, pool_group: int, pool: int) -> torch.Tensor:
        """The pool's host tier: uint8 ``[num_host_slots, encoded slot bytes]``, contiguous."""
        return self._host_pools[pool_group][pool]

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
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        device_slots = self.slots[pool_group]
        read = _checked("source", sources, device_slots)
        written = _checked_targets(targets, device_slots, len(sources))
        if not read.isdisjoint(written):
            raise ValueError(f"slots both read and written: {sorted(read & written)}")
        for pool in self._pools[pool_group]:
            copy_rows(Rows(pool, sources), Rows(pool, targets))
        self._settle()

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        _checked("device", device_slots, self.slots[pool_group])
        _checked_targets(host_slots, self.host_slots[pool_group], len(device_slots))
        encode = None if self._codec is None else self._codec.encode
        pools = zip(self._pools[pool_group], self._host_pools[pool_group], strict=True)
        for pool, host_pool in pools:
            copy_rows(Rows(pool, device_slots), Rows(host_pool, host_slots), encode)
        self._settle()

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        _checked("host", host_slots, self.host_slots[pool_group])
        _checked_targets(device_slots, self.slots[pool_group], len(host_slots))
        decode = None if self._codec is None else self._codec.decode
        pools = zip(self._pools[pool_group], self._host_pools[pool_group], strict=True)
        for pool, host_pool in pools:
            copy_rows(Rows(host_pool, host_slots), Rows(pool, device_slots), decode)
        self._settle()

    def _settle(self) -> None:
        """Wait for the copies: a transfer that is posted next is not ordered behind the stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _checked(name: str, slots: SlotArray, num_slots: int) -> set[int]:
    """The slots of a call. One out of range (-1 for a missing page) would be another's bytes."""
    if slots.dtype != np.int32 or slots.ndim != 1:
        raise ValueError(f"expected {name} slots as int32 [n], got {slots.dtype} {slots.shape}")
    chosen = set(slots.tolist())
    if chosen and (min(chosen) < 0 or max(chosen) >= num_slots):
        raise ValueError(f"expected {name} slots within 0..{num_slots - 1}, got {slots}")
    return chosen


def _checked_targets(targets: SlotArray, num_slots: int, count: int) -> set[int]:
    """Likewise; they must be distinct, and as many as there are sources."""
    chosen = _checked("target", targets, num_slots)
    if len(targets) != count:
        raise ValueError(f"expected as many targets as sources, got {len(targets)} and {count}")
    if len(chosen) != count:
        raise ValueError(f"expected distinct target slots, got {targets}")
    return chosen
