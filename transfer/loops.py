"""Telling an event loop something from another thread, which may outlive the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def call_in(
    loop: asyncio.AbstractEventLoop, step: Callable[[*Arguments], object], *arguments: *Arguments
) -> bool:
    """Have the loop's thread call this soon. False where the loop is closed: it has nobody left to
    tell, and the step is not called.
    """
    try:
        loop.call_soon_threadsafe(step, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
