"""Uploads of host arrays to fixed device memory, from snapshots: one vector, or two small arrays
together in one copy.

The caller may change its arrays as soon as an upload has returned: what is copied is a snapshot
that is neither reused nor freed before the copy is complete, however many uploads are queued.
Targets lie at a fixed address, so captured graphs may read them.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from typing_extensions import override

MAX_UPLOAD_BYTES = 4096
ALIGNMENT_BYTES = 16


class PendingCopy(Protocol):
    """A copy that was queued."""

    def is_complete(self) -> bool:
        """Whether the source may be overwritten. Never waits."""
        ...


class CopyQueue(Protocol):
    """Where copies run, in the order in which they were queued."""

    def snapshot(self, size: int) -> torch.Tensor:
        """Host memory, uint8 ``[size]``, that :meth:`copy` can read without blocking."""
        ...

    def accepts(self, source: torch.Tensor) -> bool:
        """Whether ``source`` is memory that qualifies for this queue."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        """Queue the copy of a snapshot to ``target``."""
        ...


class HostCopies(CopyQueue):
    """The CPU twin: copies are complete when they return, any host memory qualifies."""

    class _Done(PendingCopy):
        @override
        def is_complete(self) -> bool:
            return True

    @override
    def snapshot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @override
    def accepts(self, source: torch.Tensor) -> bool:
        return source.device.type == "cpu"

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        target.copy_(source)
        return self._Done()


class CudaCopies(CopyQueue):
    """Copies in the current stream of the calling thread; pageable memory does not qualify."""

    class _Event(PendingCopy):
        def __init__(self, event: torch.cuda.Event) -> None:
            self._event = event

        @override
        def is_complete(self) -> bool:
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def snapshot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @override
    def accepts(self, source: torch.Tensor) -> bool:
        return source.device.type == "cpu" and source.is_pinned()

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return self._Event(event)


class Snapshots:
    """Host memory of one size, lent to one copy at a time."""

    def __init__(self, size_bytes: int, queue: CopyQueue) -> None:
        self._size_bytes = size_bytes
        self._queue = queue
        self._free: list[torch.Tensor] = []
        self._in_flight: deque[tuple[PendingCopy, torch.Tensor]] = deque()

    @property
    def made(self) -> int:
        """How many there are, in flight and free."""
        return len(self._free) + len(self._in_flight)

    def take(self) -> torch.Tensor:
        """One that no copy reads any more, uint8 ``[size_bytes]``, holding anything."""
        while self._in_flight and self._in_flight[0][0].is_complete():
            self._free.append(self._in_flight.popleft()[1])
        return self._free.pop() if self._free else self._queue.snapshot(self._size_bytes)

    def send(self, snapshot: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy of one that was taken and filled to ``target``."""
        self._in_flight.append((self._queue.copy(snapshot, target), snapshot))


def queue_of(device: torch.device) -> CopyQueue:
    """The device's own queue."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class VectorUpload:
    """A vector on a device that is overwritten step after step, whatever steps are still queued.
    One thread uses it.
    """

    def __init__(
        self, values: torch.Tensor, device: torch.device, queue: CopyQueue | None = None
    ) -> None:
        """``vector`` begins as ``values``, contiguous host memory ``[n]``; ``queue`` defaults to
        the device's own.
        """
        self.vector = values.to(device, copy=True)
        self._bytes = self.vector.view(torch.uint8)
        self._snapshots = Snapshots(values.nbytes, queue_of(device) if queue is None else queue)
        self._taken: torch.Tensor | None = None

    def host(self) -> torch.Tensor:
        """Host memory like the vector, holding anything: to be filled as a whole, then sent."""
        if self._taken is None:
            self._taken = self._snapshots.take()
        return self._taken.view(self.vector.dtype)

    def send(self) -> None:
        """Queue the values that :meth:`host` was filled with; it gives other memory from now on.

        Raises ValueError: it was not asked for since the last time.
        """
        if self._taken is None:
            raise ValueError("expected host() to be filled before send(), got nothing to send")
        taken, self._taken = self._taken, None
        self._snapshots.send(taken, self._bytes)

    @property
    def snapshots(self) -> int:
        """Snapshots that exist, in flight and free."""
        return self._snapshots.made


class PairUpload:
    """Two device tensors, written by nobody else, and the way their values get there: those that
    have not changed need no write. One thread uses it.
    """

    def __init__(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        device: torch.device | str = "cpu",
        queue: CopyQueue | None = None,
    ) -> None:
        """Targets get shape and type of ``first`` and ``second`` and start as zeros.

        ``queue`` defaults to the device's own.
        """
        where = torch.device(device)
        self._starts = (0, -(-first.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        size = self._starts[1] + second.nbytes
        self._queue = queue_of(where) if queue is None else queue
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=where)
        self._uploaded = torch.zeros(size, dtype=torch.uint8)
        """What the device holds once all queued copies have run, while ``_is_known``."""
        self._is_known = True
        self.first = self._part(self._device_bytes, 0, first)
        self.second = self._part(self._device_bytes, 1, second)
        self._snapshots = Snapshots(size, self._queue)

    def upload(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Queue the values of both arrays; False, and nothing written, where they do not qualify.

        They qualify as contiguous host tensors of the targets' shapes and types, at most
        MAX_UPLOAD_BYTES together, pinned where the target is CUDA. Values equal to the last
        upload's are not written again. After False the caller writes the targets itself.
        """
        sources = (first, second)
        if len(self._uploaded) > MAX_UPLOAD_BYTES or not all(
            self._qualifies(source, target)
            for source, target in zip(sources, (self.first, self.second), strict=True)
        ):
            self._is_known = False
            return False
        parts = [self._part(self._uploaded, number, sources[number]) for number in (0, 1)]
        changes = any(
            not _same_bits(part, source) for part, source in zip(parts, sources, strict=True)
        )
        if self._is_known and not changes:
            return True
        self._is_known = True
        for part, source in zip(parts, sources, strict=True):
            part.copy_(source)
        snapshot = self._snapshots.take()
        snapshot.copy_(self._uploaded)
        self._snapshots.send(snapshot, self._device_bytes)
        return True

    @property
    def snapshots(self) -> int:
        """Snapshots that exist, in flight and free."""
        return self._snapshots.made

    def _qualifies(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        return (
            source.shape == target.shape
            and source.dtype == target.dtype
            and source.is_contiguous()
            and self._queue.accepts(source)
        )

    def _part(self, whole: torch.Tensor, number: int, like: torch.Tensor) -> torch.Tensor:
        start = self._starts[number]
        return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of bytes: NaN equals itself, and 0.0 is not -0.0."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
