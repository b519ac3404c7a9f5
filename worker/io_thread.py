"""The IO thread of a worker: one event loop for the front-end server and the transfer agent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from transfer.loops import call_in

ResultT = TypeVar("ResultT")


class IoThread:
    """An event loop in a thread of its own. ``run`` and ``stop`` are for other threads."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pageferry-io", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float | None = None) -> ResultT:
        """Run a coroutine in the loop and wait for its result. Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and wait for its thread."""
        if self._thread.is_alive():
            call_in(self.loop, self.loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
