"""Generation side: dials the ranks of a context instance, then starts a request's sessions at once.
A prefix pull starts alike: the pulling instance is the generation side of it, its source the other.

A rank has a session with every rank that has pages for it. Leaders have one with each other,
because only they have first tokens, and the leader has one with a context rank that nobody else
receives from, so that every context rank hears of the request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from transfer.agent_pair import Pair, Side
from transfer.agent_peers import PeerConnector
from transfer.agent_requests import RequestBook
from transfer.control import HandshakeError
from transfer.deadlines import TransferLimits
from transfer.generation_session import GenerationSession
from transfer.identity import PeerAddress
from transfer.outcome import Outcome
from transfer.peers import require_dp_group
from transfer.pull_order import PullOrder
from transfer.request_transfer import RequestTransfer
from transfer.session_events import GrantRequested

logger = logging.getLogger(__name__)

NOTHING_SENT: Final = "no rank of the context instance sends to this one"


@dataclass(frozen=True, slots=True)
class GrantOrder:
    """What the engine promised: all is over at ``end_s`` of the loop's clock."""

    request_id: str
    sources: tuple[PeerAddress, ...]
    prompt_tokens: int
    end_s: float
    session_type: ClassVar[type[GenerationSession]] = GenerationSession

    def opening(self, left_ms: int, receivers: int) -> GrantRequested:
        """What starts each session."""
        return GrantRequested(self.prompt_tokens, left_ms, receivers)


Order = GrantOrder | PullOrder


Unstarted = Callable[[str, Outcome, str, str], None]
"""Told of a request that ended before it had a session: id, outcome, reason, kind of failure."""


class GrantsOut:
    """Starts generation sessions of one rank."""

    def __init__(
        self,
        *,
        peers: PeerConnector,
        book: RequestBook,
        limits: TransferLimits,
        unstarted: Unstarted,
        now_s: Callable[[], float],
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """``now_s`` is the time of the orders' ends; ``draw`` gives so many random bits."""
        self._peers: Final = peers
        self._book: Final = book
        self._limits: Final = limits
        self._unstarted: Final = unstarted
        self._now_s: Final = now_s
        self._draw: Final = draw
        self._dialling: dict[str, asyncio.Task[None]] = {}

    @property
    def dialling(self) -> tuple[str, ...]:
        """Requests of which some context rank is still being dialled."""
        return tuple(self._dialling)

    def open(self, order: Order) -> None:
        """Start the sessions, after dialling where a rank is not connected."""
        pairs = [self._peers.open_pair(Side.GENERATION, rank.rank_id) for rank in order.sources]
        connected = [pair for pair in pairs if pair is not None]
        if len(connected) == len(pairs):
            self._start(order, connected)
            return
        if isinstance(order, GrantOrder):
            self._book.counters.late_dials_total += 1
        task = asyncio.get_running_loop().create_task(self._dial(order))
        self._dialling[order.request_id] = task
        task.add_done_callback(partial(self._dial_ended, order))

    def stop(self, request_id: str, reason: str) -> bool:
        """Give up a request that is still being dialled. False when it is not."""
        task = self._dialling.pop(request_id, None)
        if task is None:
            return False
        # A task that was never run cannot report its own cancellation.
        task.cancel()
        self._unstarted(request_id, Outcome.CANCELLED, reason, "cancelled")
        return True

    async def _dial(self, order: Order) -> None:
        try:
            async with asyncio.timeout_at(order.end_s):
                pairs = await asyncio.gather(*(self._pair_with(rank) for rank in order.sources))
        except TimeoutError:
            self._fail_dial(order, "no connection before the deadline", "deadline")
            return
        except HandshakeError as error:
            self._fail_dial(order, str(error), "connect")
            return
        lost = [pair for pair in pairs if not pair.open]
        if lost:
            names = ", ".join(str(pair.peer.rank_id) for pair in lost)
            self._fail_dial(order, f"{names}: lost while other ranks were dialled", "connect")
            return
        if self._dialled(order):
            self._start(order, pairs)

    def _dial_ended(self, order: Order, task: asyncio.Task[None]) -> None:
        """Whatever becomes of a dial, its request ends."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._dialling.get(order.request_id) is task:
            del self._dialling[order.request_id]
            logger.error("request %s could not be opened", order.request_id, exc_info=error)
            self._unstarted(order.request_id, Outcome.FAILED, f"dialling: {error!r}", "engine")

    async def _pair_with(self, rank: PeerAddress) -> Pair:
        try:
            return await self._peers.pair_with(rank)
        except HandshakeError as error:
            raise HandshakeError(f"{rank.rank_id}: {error}") from error

    def _fail_dial(self, order: Order, reason: str, kind: str) -> None:
        if self._dialled(order):
            self._unstarted(order.request_id, Outcome.FAILED, reason, kind)

    def _dialled(self, order: Order) -> bool:
        """The dialling is over; False when it was stopped, and its end told, before it noticed."""
        if self._dialling.get(order.request_id) is not asyncio.current_task():
            return False
        del self._dialling[order.request_id]
        return True

    def _start(self, order: Order, pairs: Sequence[Pair]) -> None:
        try:
            require_dp_group([pair.peer for pair in pairs])
        except ValueError as error:
            self._unstarted(order.request_id, Outcome.FAILED, str(error), "engine")
            return
        names = {pair: f"{self._draw(64):016x}" for pair in pairs if pair.granters}
        if not names:
            self._unstarted(order.request_id, Outcome.SUCCEEDED, NOTHING_SENT, "")
            return
        leads = self._peers.info.shape.leads
        leading = [name for pair, name in names.items() if leads and pair.peer.shape.leads]
        core = RequestTransfer(order.request_id, len(names), leading[0] if leading else None)
        running = self._book.open(Side.GENERATION, core, order.prompt_tokens)
        sessions = {pair: self._session(order, pair, names[pair]) for pair in names}
        for pair, session in sessions.items():
            running.join(pair, session)
        left_ms = max(int((order.end_s - self._now_s()) * 1000), 1)
        for pair, session in sessions.items():
            pair.drive(session, order.opening(left_ms, pair.granters))

    def _session(self, order: Order, pair: Pair, name: str) -> GenerationSession:
        return order.session_type(
            request_id=order.request_id,
            session=name,
            peer=pair.incarnation,
            plan=pair.plan,
            limits=self._limits,
            tag=self._draw(64),
        )
