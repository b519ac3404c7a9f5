"""A UCX process that listens, and takes its time between the listener's end and the worker's.

What a process that gets no core just then does, without its timing. It hears who knocks for longer
than a test may take.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final
from unittest.mock import patch

from tests.transfer.ucx_peer import OPENING
from transfer.ucx import driver
from transfer.ucx.driver import Unit
from transfer.ucx.transport import UcxTransport

PAUSE_S: Final = 0.3
KNOCK_S: Final = 10.0


async def listen() -> None:
    """Close the expectation at the first line, and everything at the second."""
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    expectation = await transport.expect(OPENING)
    print(f"port {expectation.address.port}")
    await asyncio.to_thread(sys.stdin.readline)
    expectation.close()
    print("closed")
    await asyncio.to_thread(sys.stdin.readline)
    await transport.close()
    print("bye")


def main() -> None:
    """The process's life."""

    def assign(unit: Unit, listener: Any) -> None:
        had = unit.__dict__.get("listener") is not None
        unit.__dict__["listener"] = listener
        if had:
            time.sleep(PAUSE_S)

    slow = property(lambda unit: unit.__dict__["listener"], assign)
    with (
        patch.object(driver, "KNOCK_S", KNOCK_S),
        patch.object(Unit, "listener", slow, create=True),
    ):
        asyncio.run(listen())
