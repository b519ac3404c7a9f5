"""Staging of pages in torch pools: passes in a thread of their own, on a stream of their own.

Why a pass reads and writes the right bytes. *Pages before a gather*: pages are shipped when their
step has returned, and the executor waits for the device before it returns, as does the storage
after each copy; so whatever wrote them is over on the device before a pass is asked for, and no
stream has to be ordered behind another. *After a pass*: its thread waits for the device before the
pass counts as over, so a gathered message may be sent by UCX, on streams that nothing here knows,
and scattered pages may be read by any later step. *Messages* are allocated for a stream on which
nothing else ever is: torch's allocator, which gives memory again to the stream that it was freed
from, can only give one message's memory to another, never that of a tensor which a kernel in flight
still uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch
from typing_extensions import override

from transfer.page_staging import PoolStaging
from transfer.passes import PassOver, PassRunner, PassThread
from worker.device_copies import DeviceCopies, IndexedUnits

DEVICE_MESSAGE_BYTES: Final = 32 << 20
"""A message costs 70 us whatever its size, the time of 30 MB between two GPUs; four such buffers a
pair are 128 MiB.
"""


class PassDevice(Protocol):
    """Where passes run and messages lie."""

    def empty(self, size_bytes: int) -> torch.Tensor:
        """New memory, uint8 ``[size_bytes]``, that nothing queued uses. Raises MemoryError."""

    def run(self, work: Callable[[], None]) -> None:
        """Carry out what ``work`` queues in the current stream, and wait for it."""


class HostDevice(PassDevice):
    """torch on the CPU, where nothing is queued."""

    @override
    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    @override
    def run(self, work: Callable[[], None]) -> None:
        work()


class CudaDevice(PassDevice):
    """One CUDA device. ``run`` is for one thread at a time; it sleeps while it waits, and does not
    hold the interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A few short kernels between those of a step, which would keep them waiting otherwise.
        self._passes = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._messages = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @override
    def empty(self, size_bytes: int) -> torch.Tensor:
        try:
            with torch.cuda.stream(self._messages):
                return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"expected {size_bytes} free bytes on {self._device} for a message of pages; "
                "leave more memory beside weights and KV cache"
            ) from error

    @override
    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._passes):
            try:
                work()
            finally:
                # What was queued before a failure touches pages too.
                self._over.record(self._passes)
                self._over.synchronize()


class DevicePasses(PassRunner):
    """Passes in a thread that waits for the device."""

    def __init__(self, device: PassDevice) -> None:
        self._device = device
        self._thread = PassThread()

    @override
    def start(self, work: Callable[[], None], over: PassOver) -> None:
        self._thread.start(lambda: self._device.run(work), over)


class DeviceStaging(PoolStaging[torch.Tensor]):
    """Pools as tensors of one device; a message is a tensor of it. Passes are over later."""

    def __init__(
        self, pools: Mapping[int, Sequence[torch.Tensor]], copies: DeviceCopies, device: PassDevice
    ) -> None:
        super().__init__(pools, copies, DevicePasses(device))
        self._device = device

    @classmethod
    def on(cls, device: torch.device, pools: Mapping[int, Sequence[torch.Tensor]]) -> DeviceStaging:
        """Staging of pools that lie on ``device``: by kernels on CUDA, else by torch."""
        if device.type != "cuda":
            return cls(pools, DeviceCopies(IndexedUnits()), HostDevice())
        # Part of torch's CUDA builds, of no other.
        from worker.device_kernels import TritonUnits

        mover, cuda = TritonUnits(), CudaDevice(device)
        cuda.run(lambda: mover.warm_up(device))
        return cls(pools, DeviceCopies(mover), cuda)

    @property
    @override
    def message_bytes(self) -> int:
        return DEVICE_MESSAGE_BYTES

    @override
    def message(self, size_bytes: int) -> torch.Tensor:
        return self._device.empty(size_bytes)
