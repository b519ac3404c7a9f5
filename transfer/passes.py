"""Where passes over pages run: in the call that asks for them, or in a thread of their own.

Measured on two CPU processes that share two cores, others use them too, and stage messages of
4 MiB: with a thread a transfer takes no longer, and the 99th percentile of what a timer waits in
the event loop falls from 7-27 ms to 3-10. A device has to be waited for anyway.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from typing_extensions import override

from transfer.loops import call_in

logger = logging.getLogger(__name__)

PassOver = Callable[[str], None]
"""Called once, in the event loop, when a pass is over: with why it failed, or with nothing."""


class PassRunner(Protocol):
    """Runs passes in the order in which they are started, one at a time."""

    def start(self, work: Callable[[], None], over: PassOver) -> None:
        """Have ``work`` done. Called in the event loop; ``over`` may come before it returns."""


class AtOnce(PassRunner):
    """In the call itself, which raises what ``work`` raises."""

    @override
    def start(self, work: Callable[[], None], over: PassOver) -> None:
        work()
        over("")


_Order = tuple[asyncio.AbstractEventLoop, Callable[[], None], PassOver]


class PassThread(PassRunner):
    """In one thread, which ends with this object. No executor: that makes two futures a pass."""

    def __init__(self) -> None:
        self._orders: Final[SimpleQueue[_Order | None]] = SimpleQueue()
        weakref.finalize(self, self._orders.put, None)
        threading.Thread(
            target=_run, args=(self._orders,), name="pageferry-staging", daemon=True
        ).start()

    @override
    def start(self, work: Callable[[], None], over: PassOver) -> None:
        self._orders.put((asyncio.get_running_loop(), work, over))


def _run(orders: SimpleQueue[_Order | None]) -> None:
    """The thread. It must not hold the object that it ends with."""
    while (order := orders.get()) is not None:
        loop, work, over = order
        failure = _failure(work)
        call_in(loop, over, failure)
        # What a pass holds ends with it, not with the next one.
        del order, loop, work, over


def _failure(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:
        logger.exception("a pass over pages failed")
        return f"{type(error).__name__}: {error}"
    return ""
