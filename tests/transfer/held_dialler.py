"""A UCX process that dials, and is held up right after a connect() of UCX's.

UCX calls connect() twice in a dial: for the connection, then for its TCP lane, unless the
listener's side makes that one. The call says ``held`` and returns when a line has come. It is put
in the place of libc's in the table of addresses through which ``libucs`` calls other libraries.
"""

from __future__ import annotations

import asyncio
import ctypes
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.transfer.ucx_peer import OPENING
from transfer.transport import TransportAddress, TransportError
from transfer.ucx.library import mapped_file
from transfer.ucx.transport import UcxTransport

RELOCATIONS: Final = 4
"""``SHT_RELA``."""
CONNECT: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


def imports(library: bytes) -> Iterator[tuple[bytes, int]]:
    """Names that a 64-bit ELF library imports, and where it keeps their addresses."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", library, table + size * number) for number in range(count)
    ]
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind != RELOCATIONS:
            continue
        symbols, names = sections[link][4], sections[sections[link][6]][4]
        for entry in range(start, start + length, 24):
            slot, info = struct.unpack_from("<QQ", library, entry)
            (name,) = struct.unpack_from("<I", library, symbols + 24 * (info >> 32))
            end = library.index(b"\0", names + name)
            yield library[names + name : end], slot


class HeldConnect:
    """Counts calls of connect() by UCX, and holds up one."""

    def __init__(self, held: int) -> None:
        self._held = held
        self._connect: Any = ctypes.CDLL(None, use_errno=True).connect
        self._connect.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
        self._calls = 0
        self.callback = CONNECT(self._called)

    def install(self) -> None:
        """From now on UCX calls this."""
        path = mapped_file("libucs.so")
        lines = Path("/proc/self/maps").read_text().splitlines()
        base = int(next(line for line in lines if line.endswith(path)).split("-")[0], 16)
        slot = base + dict(imports(Path(path).read_bytes()))[b"connect"]
        address = ctypes.cast(self.callback, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(slot).value = address

    def _called(self, descriptor: int, address: int, length: int) -> int:
        result = int(self._connect(descriptor, address, length))
        self._calls += 1
        if self._calls == self._held:
            error = ctypes.get_errno()
            print("held")
            sys.stdin.readline()
            ctypes.set_errno(error)
        return result


async def dial(port: int, held: int) -> None:
    """Dial once and say how it ended."""
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    connect = HeldConnect(held)
    connect.install()
    try:
        await transport.connect(TransportAddress("127.0.0.1", port), OPENING, timeout_s=10.0)
    except TransportError as error:
        print(f"failed {error}")
    else:
        print("connected")
    await transport.close()


def main(port: str, held: str) -> None:
    """``held`` is the number of the call: 1 for the connection, 2 for the lane."""
    asyncio.run(dial(int(port), int(held)))
