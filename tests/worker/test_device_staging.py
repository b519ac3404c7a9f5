"""Staging in a thread: when passes are over, what they are ordered behind, whose memory messages
are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.support.devices import DEVICES, usable
from transfer.copy_plan import CopyPlan
from transfer.plan import Fragment, GroupPlan, GroupSide
from transfer.staged_cut import DEVICE_MESSAGE_BYTES
from worker.device_copies import DeviceCopies, IndexedUnits, UnitIndex
from worker.device_staging import (
    CudaDevice,
    DeviceStaging,
    HostDevice,
    PassDevice,
    PassEnd,
)

SIDE = GroupSide(0, 0, (16,))
HALVES = CopyPlan.of(GroupPlan(SIDE, SIDE, (Fragment(0, 8, 0, 0, 8), Fragment(0, 0, 0, 8, 8))))
"""The halves of a slot change places, in the scatter: a message is in the sender's order."""
SLOTS = np.array([2, 0], dtype=np.int32)
LATE_CYCLES = 50_000_000
"""Some 25 ms of a GPU."""


@dataclass
class Passes:
    """What is told of passes, and in which thread."""

    told: list[tuple[str, str]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def over(self, name: str) -> Callable[[str], None]:
        def tell(failure: str) -> None:
            self.told.append((name, failure))
            self.threads.add(threading.get_ident())
            self.came.set()

        return tell

    async def expect(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.told) < count:
                self.came.clear()
                await self.came.wait()


def pool_on(device: str) -> torch.Tensor:
    """Bytes that tell their places, and are there."""
    pool = torch.arange(48, dtype=torch.uint8, device=device).view(3, 16)
    settle(device)
    return pool


def zeros_on(device: str) -> torch.Tensor:
    pool = torch.zeros((3, 16), dtype=torch.uint8, device=device)
    settle(device)
    return pool


def settle(device: str) -> None:
    """Whoever asks for a pass has waited for what wrote the pages."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize("device", DEVICES)
async def test_passes_run_in_order_and_end_in_the_loop(device: str) -> None:
    usable(device)
    source, target = pool_on(device), zeros_on(device)
    staging = DeviceStaging.on(torch.device(device), {0: [source], 5: [target]})
    message, passes = staging.message(64)[:32], Passes()
    assert message.device.type == device
    staging.gather(HALVES, 0, SLOTS, message, passes.over("gather"))
    # Asked for at once: it reads what the pass before it writes.
    staging.scatter(HALVES, message, 5, np.array([1, 2], dtype=np.int32), passes.over("scatter"))
    assert passes.told == []
    await passes.expect(2)
    assert passes.told == [("gather", ""), ("scatter", "")]
    assert passes.threads == {threading.get_ident()}
    halves = source.roll(8, dims=1)
    assert torch.equal(target[1:], halves[[2, 0]])
    assert not target[0].any()


@pytest.mark.parametrize("device", DEVICES)
async def test_what_does_not_fit_is_refused_at_once(device: str) -> None:
    usable(device)
    staging = DeviceStaging.on(torch.device(device), {0: [pool_on(device)]})
    message, passes = staging.message(32), Passes()
    with pytest.raises(ValueError, match="pool 0 has 3 slots"):
        staging.gather(HALVES, 0, SLOTS + 1, message, passes.over("gather"))
    with pytest.raises(ValueError, match="message of 2 blocks"):
        staging.scatter(HALVES, message[:31], 0, SLOTS, passes.over("scatter"))
    staging.gather(HALVES, 0, SLOTS, message, passes.over("good"))
    await passes.expect(1)
    assert passes.told == [("good", "")]


async def test_a_failure_is_told_and_the_next_pass_runs() -> None:
    class Failing(IndexedUnits):
        failures = 1

        @override
        def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("an illegal memory access")
            super().gather(pool, index, message)

    staging = DeviceStaging({0: [pool_on("cpu")]}, DeviceCopies(Failing()), HostDevice())
    message, passes = staging.message(32), Passes()
    for name in ("bad", "good"):
        staging.gather(HALVES, 0, SLOTS, message, passes.over(name))
    await passes.expect(2)
    assert passes.told == [("bad", "RuntimeError: an illegal memory access"), ("good", "")]
    assert message.tolist() == [*range(32, 48), *range(16)]


async def test_the_loop_and_the_next_pass_go_on_while_a_device_is_busy() -> None:
    class Busy(PassDevice):
        def __init__(self) -> None:
            self.free = threading.Event()
            self.begun: list[Callable[[], None]] = []

        @property
        @override
        def message_bytes(self) -> int:
            return 64

        @override
        def empty(self, size_bytes: int) -> torch.Tensor:
            return torch.empty(size_bytes, dtype=torch.uint8)

        @override
        def begin(self, work: Callable[[], None]) -> PassEnd:
            self.begun.append(work)
            return BusyEnd(self.free, work)

    class BusyEnd(PassEnd):
        def __init__(self, free: threading.Event, work: Callable[[], None]) -> None:
            self._free, self._work = free, work

        @override
        def wait(self) -> None:
            assert self._free.wait(30)
            self._work()

    device = Busy()
    staging = DeviceStaging({0: [pool_on("cpu")]}, DeviceCopies(IndexedUnits()), device)
    message, passes = staging.message(32), Passes()
    for name in ("first", "second"):
        staging.gather(HALVES, 0, SLOTS, message, passes.over(name))
    # The second is begun behind the first, which is not over.
    assert len(device.begun) == 2
    for _ in range(100):
        await asyncio.sleep(0)
    assert not passes.told
    device.free.set()
    await passes.expect(2)
    assert passes.told == [("first", ""), ("second", "")]


class Late(IndexedUnits):
    """Keeps the device busy before each copy."""

    @override
    def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        super().gather(pool, index, message)

    @override
    def scatter(self, message: torch.Tensor, pool: torch.Tensor, index: UnitIndex) -> None:
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        super().scatter(message, pool, index)


@contextmanager
def unordered() -> Iterator[torch.cuda.Stream]:
    """A stream that waits for no other: what UCX and the next step are to a pass."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield stream


@pytest.mark.gpu
async def test_a_pass_is_over_on_the_device_when_it_is_told() -> None:
    usable("cuda")
    source, target = pool_on("cuda"), zeros_on("cuda")
    device = CudaDevice(torch.device("cuda", 0))
    staging = DeviceStaging({0: [source], 1: [target]}, DeviceCopies(Late()), device)
    message, passes = staging.message(32), Passes()
    message.zero_()
    torch.cuda.synchronize()
    staging.gather(HALVES, 0, SLOTS, message, passes.over("gather"))
    await passes.expect(1)
    with unordered():
        assert message.cpu().tolist() == source[[2, 0]].view(-1).tolist()
    staging.scatter(HALVES, message, 1, SLOTS, passes.over("scatter"))
    await passes.expect(2)
    with unordered():
        assert target[[2, 0]].cpu().tolist() == source.roll(8, dims=1)[[2, 0]].tolist()


@pytest.mark.gpu
async def test_a_gather_after_a_step_has_returned_reads_what_the_step_wrote() -> None:
    """A step is over when the stream that it ran in has been waited for, as the executor does."""
    usable("cuda")
    source = pool_on("cuda")
    expected = torch.full((32,), 7).tolist()
    staging = DeviceStaging.on(torch.device("cuda", 0), {0: [source]})
    message, passes = staging.message(32), Passes()
    torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
    source.fill_(7)
    torch.cuda.current_stream().synchronize()
    staging.gather(HALVES, 0, SLOTS, message, passes.over("gather"))
    await passes.expect(1)
    assert message.tolist() == expected


@pytest.mark.gpu
def test_a_message_never_is_memory_that_a_kernel_in_flight_uses() -> None:
    usable("cuda")
    device = CudaDevice(torch.device("cuda", 0))
    busy = torch.empty(DEVICE_MESSAGE_BYTES, dtype=torch.uint8, device="cuda")
    address = busy.data_ptr()
    torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
    busy.fill_(7)
    del busy
    messages = [device.empty(DEVICE_MESSAGE_BYTES) for _ in range(2)]
    ends = [(message.data_ptr(), message.data_ptr() + message.numel()) for message in messages]
    assert all(not start <= address < end for start, end in ends)
    freed = {start for start, _ in ends}
    del messages
    # What one message leaves behind is the next one's, and nobody else's.
    assert device.empty(DEVICE_MESSAGE_BYTES).data_ptr() in freed
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_no_room_for_a_message_is_a_memory_error() -> None:
    usable("cuda")
    with pytest.raises(MemoryError, match="leave more memory"):
        CudaDevice(torch.device("cuda", 0)).empty(1 << 50)
