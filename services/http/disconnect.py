"""Ends work whose client has gone.

A server tells of a disconnect by one ``http.disconnect`` message, to whoever waits in ``receive``.
So the work of a request races that message from the moment its body was read, streaming or not;
nothing polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``, which is cancelled, and has ended, before ClientGone is raised.

    To be called after the request body was read. Cancelling the caller cancels ``work`` too.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await end_task(watcher)
        await end_task(task)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel ``task`` and wait until its own clean-up is done. What it raised is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at, or asyncio would complain that nobody did
