"""What a CUDA device has free and what torch takes of it. There is one reader a rank."""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override

from worker.memory_budget import MemoryReading


class DeviceMemory(Protocol):
    """The memory of the device that a rank runs on. Reading it waits for the device."""

    def reading(self) -> MemoryReading:
        """How it is now; torch first gives back what it holds and does not use."""
        ...

    def watch(self) -> None:
        """Begin to watch for the peak."""
        ...

    def peak_bytes(self) -> int:
        """Most that torch has reserved since :meth:`watch` beyond what it had then."""
        ...

    def limit_torch(self, cap_bytes: int) -> None:
        """Let torch reserve no more than this; beyond it, it runs out of memory."""
        ...


class CudaMemory(DeviceMemory):
    """A CUDA device as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0

    @override
    def reading(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total_bytes=total,
            free_bytes=free,
            reserved_bytes=torch.cuda.memory_reserved(self._device),
        )

    @override
    def watch(self) -> None:
        self._base_bytes = self.reading().reserved_bytes
        torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._base_bytes

    @override
    def limit_torch(self, cap_bytes: int) -> None:
        _, total = torch.cuda.mem_get_info(self._device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), self._device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The reader of a device's memory; None for a CPU, whose memory others divide."""
    return CudaMemory(device) if device.type == "cuda" else None
