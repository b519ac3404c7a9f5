"""Where passes over pages run: in the call that asks for them, or in a thread of their own.

Measured on two CPU processes that share two cores, others use them too, and stage messages of
4 MiB: with a thread a transfer takes no longer, and the 99th percentile of what a timer waits in
the event loop falls from 7-27 ms to 3-10. A device has to be waited for anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from typing_extensions import override

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


class PassThread(PassRunner):
    """In one thread, which ends with this object."""

    def __init__(self) -> None:
        self._thread: Final = ThreadPoolExecutor(1, "pageferry-staging")

    @override
    def start(self, work: Callable[[], None], over: PassOver) -> None:
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(lambda ended: over(_failure(ended)))


def _failure(ended: asyncio.Future[None]) -> str:
    error = ended.exception()
    if error is None:
        return ""
    logger.error("a pass over pages failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
