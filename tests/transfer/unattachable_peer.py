"""A UCX process whose shared memory nobody can attach, as that of one that has just died.

What the others see of a death at the worst moment of a dial, without its timing: its segments are
gone, and it goes on with private memory in their place.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.transfer.ucx_peer import OPENING
from transfer.transport import TransportAddress, TransportError
from transfer.ucx.driver import Driver, Unit
from transfer.ucx.expectation import UcxExpectation
from transfer.ucx.transport import UcxTransport

MAP_FIXED: Final = 0x10
DIAL_S: Final = 5.0


def leave_shared_memory() -> int:
    """Replace every System V segment of this process by a private copy; how many there were."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.shmdt.argtypes = (ctypes.c_void_p,)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    lines = Path("/proc/self/maps").read_text().splitlines()
    segments = [line.split()[0] for line in lines if "/SYSV" in line]
    for segment in segments:
        start, end = (int(bound, 16) for bound in segment.split("-"))
        content = ctypes.string_at(start, end - start)
        assert libc.shmdt(start) == 0
        assert libc.mmap(start, end - start, protection, flags, -1, 0) == start
        ctypes.memmove(start, content, end - start)
    return len(segments)


async def listen() -> None:
    """Expect a dialler until stdin ends."""
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    expectation = await transport.expect(OPENING)
    print(f"port {expectation.address.port}")
    await asyncio.to_thread(sys.stdin.read)


async def stand_still() -> None:
    """:func:`listen`, and stop as soon as somebody has dialled: before the dialler is told of any
    lane but its first.
    """
    dialled = UcxExpectation._dialled

    def stop(expectation: UcxExpectation, raw: Any) -> None:
        dialled(expectation, raw)
        print("dialled")
        os.kill(os.getpid(), signal.SIGSTOP)

    with patch.object(UcxExpectation, "_dialled", stop):
        await listen()


async def dial(port: int) -> None:
    """Dial once and say how it ended."""
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    try:
        await transport.connect(TransportAddress("127.0.0.1", port), OPENING, timeout_s=DIAL_S)
    except TransportError as error:
        print(f"failed {error}")
    else:
        print("connected")


def main(*words: str) -> None:
    """``listen``, ``stand_still``, or ``dial PORT``."""
    open_unit = Driver.open_unit

    def open_unattachable(driver: Driver) -> Unit:
        unit = open_unit(driver)
        assert leave_shared_memory() > 0
        return unit

    with patch.object(Driver, "open_unit", open_unattachable):
        match words:
            case ["listen"]:
                asyncio.run(listen())
            case ["stand_still"]:
                asyncio.run(stand_still())
            case ["dial", port]:
                asyncio.run(dial(int(port)))
            case _:
                raise ValueError(f"expected 'listen', 'stand_still' or 'dial PORT', got {words}")
