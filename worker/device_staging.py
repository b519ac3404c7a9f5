"""Staging of pages in torch pools: passes on a stream of their own, waited for in a thread of their
own.

Why a pass reads and writes the right bytes. *Pages before a gather*: pages are shipped when their
step has returned, and the executor waits for the device before it returns, as does the storage
after each copy; so whatever wrote them is over on the device before a pass is asked for, and no
stream has to be ordered behind another. *Pass after pass*: one stream runs them in the order asked
for. *After a pass*: a thread waits for the device before the pass counts as over, so a gathered
message may be sent by UCX, on streams that nothing here knows, and scattered pages may be read by
any later step. *Messages* are allocated for a stream on which nothing else ever is: torch's
allocator, which gives memory again to the stream that it was freed from, can only give one
message's memory to another, never that of a tensor which a kernel in flight still uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from typing_extensions import override

from transfer import staged_cut
from transfer.page_staging import PoolStaging
from transfer.passes import PassOver, PassRunner, PassThread
from worker.device_copies import DeviceCopies, IndexedUnits


class PassEnd(Protocol):
    """The end of a pass that was begun."""

    def wait(self) -> None:
        """Return when the pass is over; raise what kept some of it from being queued."""


class PassDevice(Protocol):
    """Where passes run and messages lie."""

    @property
    def message_bytes(self) -> int:
        """Most bytes of a message of more than one block."""

    def empty(self, size_bytes: int) -> torch.Tensor:
        """New memory, uint8 ``[size_bytes]``, that nothing queued uses. Raises MemoryError."""

    def begin(self, work: Callable[[], None]) -> PassEnd:
        """Queue what ``work`` queues in the current stream, behind the passes begun before; the
        device is not waited for. Called in one thread, the ends are waited for in another.
        """


class _Deferred(PassEnd):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    @override
    def wait(self) -> None:
        self._work()


class HostDevice(PassDevice):
    """torch on the CPU, where nothing is queued: a pass runs while its end is waited for."""

    @property
    @override
    def message_bytes(self) -> int:
        return staged_cut.DEVICE_MESSAGE_BYTES

    @override
    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    @override
    def begin(self, work: Callable[[], None]) -> PassEnd:
        return _Deferred(work)


class _Recorded(PassEnd):
    def __init__(self, event: torch.cuda.Event, failure: Exception | None) -> None:
        self._event = event
        self._failure = failure

    @override
    def wait(self) -> None:
        self._event.synchronize()
        if self._failure is not None:
            raise self._failure


class CudaDevice(PassDevice):
    """One CUDA device. Who waits for an end sleeps, and does not hold the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A few short kernels between those of a step, which would keep them waiting otherwise.
        self._passes = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._messages = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        self._message_bytes = staged_cut.device_message_bytes(memory_bytes)

    @property
    @override
    def message_bytes(self) -> int:
        return self._message_bytes

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
    def begin(self, work: Callable[[], None]) -> PassEnd:
        failure: Exception | None = None
        over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._passes):
                try:
                    work()
                finally:
                    # What was queued before a failure touches pages too.
                    over.record(self._passes)
        except Exception as error:  # noqa: BLE001 (the end tells it)
            failure = error
        return _Recorded(over, failure)


class DevicePasses(PassRunner):
    """Passes begun by whoever asks, so that the device goes from one to the next by itself, and
    waited for in a thread.
    """

    def __init__(self, device: PassDevice) -> None:
        self._device = device
        self._thread = PassThread()

    @override
    def start(self, work: Callable[[], None], over: PassOver) -> None:
        self._thread.start(self._device.begin(work).wait, over)


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
        cuda.begin(lambda: mover.warm_up(device)).wait()
        return cls(pools, DeviceCopies(mover), cuda)

    @property
    @override
    def message_bytes(self) -> int:
        return self._device.message_bytes

    @override
    def message(self, size_bytes: int) -> torch.Tensor:
        return self._device.empty(size_bytes)
