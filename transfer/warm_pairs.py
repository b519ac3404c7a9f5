"""Pairs that are wanted ahead of requests: dialled until they are there, and again when lost.

Every wanted rank is connected, or has a task that dials and a reason why it is not; one that
refuses is not asked again, because an incarnation does not change its mind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from transfer.control import PeerRefusedError
from transfer.identity import PeerAddress, RankId

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
FIRST_DIAL: Final = "being dialled"


class WarmPairs:
    """Lives in the agent's loop; ``missing`` may be read from any thread.

    ``connect`` returns when pages can move and raises ConnectionError with every reason.
    ``changed`` is called whenever ``missing`` is another.
    """

    def __init__(
        self, connect: Callable[[PeerAddress], Awaitable[None]], changed: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._changed = changed
        self._wanted: dict[RankId, PeerAddress] = {}
        self._missing: dict[RankId, str] = {}
        self._tasks: dict[RankId, asyncio.Task[None]] = {}

    @property
    def missing(self) -> dict[RankId, str]:
        """Why a wanted rank is not connected."""
        return dict(self._missing)

    def want(self, peers: Iterable[PeerAddress]) -> None:
        """These are wanted, all of them and no others. Pairs that are there stay."""
        wanted = {peer.rank_id: peer for peer in peers}
        for rank in self._wanted.keys() - wanted.keys():
            self._missing.pop(rank, None)
            task = self._tasks.pop(rank, None)
            if task is not None:
                task.cancel()
        added = wanted.keys() - self._wanted.keys()
        self._wanted = wanted
        for rank in added:
            self._begin(rank, FIRST_DIAL, 0.0)
        self._changed()

    def lost(self, rank: RankId, reason: str) -> None:
        """The pair is no more; one that is wanted is dialled anew."""
        task = self._tasks.get(rank)
        if rank in self._wanted and (task is None or task.done()):
            self._begin(rank, reason, RETRY_S)
            self._changed()

    def close(self) -> None:
        """Dial no more."""
        self._wanted = {}
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _begin(self, rank: RankId, reason: str, delay_s: float) -> None:
        self._missing[rank] = reason
        dialling = self._dial(self._wanted[rank], delay_s)
        task = asyncio.get_running_loop().create_task(dialling, name=f"warm-{rank}")
        self._tasks[rank] = task
        task.add_done_callback(partial(self._ended, rank))

    async def _dial(self, peer: PeerAddress, delay_s: float) -> None:
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._connect(peer)
            except ConnectionError as error:
                self._failed(peer.rank_id, str(error))
                if isinstance(error, PeerRefusedError):
                    return
            else:
                del self._missing[peer.rank_id]
                self._changed()
                return
            delay_s = min(2 * delay_s, MAX_RETRY_S) or RETRY_S

    def _failed(self, rank: RankId, reason: str) -> None:
        if self._missing[rank] != reason:
            logger.warning("%s is not connected: %s", rank, reason)
            self._missing[rank] = reason
            self._changed()

    def _ended(self, rank: RankId, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if self._tasks.get(rank) is task:
            del self._tasks[rank]
        error = task.exception()
        if error is not None:
            logger.error("%s is not dialled any more", rank, exc_info=error)
            if rank in self._missing and rank not in self._tasks:
                self._missing[rank] = f"not dialled any more: {error!r}"
                self._changed()
