"""Pools of slots: zeroed, aligned memory on a device, or host memory that a device can copy from.

A pool is one contiguous uint8 tensor ``[num_slots, slot_bytes]`` whose first byte is aligned to
PAGE_ALIGNMENT_BYTES. Pools start zeroed, so that masked reads never meet a NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcache_core.address import PAGE_ALIGNMENT_BYTES


def aligned_pool(num_slots: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """A zeroed pool whose first byte is aligned, whatever the allocator gives."""
    total = num_slots * slot_bytes
    raw = torch.zeros(total + PAGE_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % PAGE_ALIGNMENT_BYTES
    return raw[start : start + total].view(num_slots, slot_bytes)


def pin(pool: torch.Tensor) -> Callable[[], object]:
    """Lock a host pool in memory so that CUDA copies it without staging; returns the undoing.

    Registers what is there instead of asking torch for pinned memory, which rounds a pool up to a
    power of two. Raises MemoryError when the system refuses.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = pool.data_ptr(), pool.numel()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status != 0:
        raise MemoryError(
            f"expected {size} bytes of host pool to be locked in memory, got CUDA error {status}; "
            "lower the host quota or raise the memlock limit (ulimit -l)"
        )
    return lambda: runtime.cudaHostUnregister(address)
