"""Requests under way at one rank, and their sessions, driven as ``RequestTransfer`` says.

Lives in the agent's loop. Commands of a request are carried out one after another, whatever a
session answers meanwhile, so that nothing is told out of order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

from transfer.agent_counters import TransferCounters, failure_kind
from transfer.agent_events import AgentEvent, LeaseEnded, LeaseInDoubt, SessionEnded
from transfer.agent_pair import Pair, Side
from transfer.lease import TransferLease
from transfer.leased_pages import LeasedPages
from transfer.outcome import Outcome
from transfer.request_transfer import (
    GivePages,
    LocalEvent,
    PagesGiven,
    PagesRefused,
    ReportRequest,
    RequestCommand,
    RequestState,
    RequestTransfer,
    SessionJoined,
    Tell,
)
from transfer.session import Session
from transfer.session_events import FailureReported, PagesReady, ShipRequested
from transfer.story import InvalidTransition

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    pair: Pair
    session: Session


class RunningRequest:
    """One request on one side of this rank."""

    def __init__(
        self, side: Side, core: RequestTransfer, prompt_tokens: int | None, book: RequestBook
    ) -> None:
        """``prompt_tokens`` is None for a prefix pull."""
        self.side: Final = side
        self.core: Final = core
        self.prompt_tokens: Final = prompt_tokens
        self._book = book
        self._members: dict[str, _Member] = {}
        self._queue: deque[RequestCommand] = deque()
        self._carrying_out = False
        self._failure_kind = ""
        self._doubtful: list[TransferLease] = []

    @property
    def request_id(self) -> str:
        """Of the engine."""
        return self.core.request_id

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Pairs of the sessions that have joined."""
        return tuple(member.pair for member in self._members.values())

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Those that have joined."""
        return tuple(member.session for member in self._members.values())

    def join(self, pair: Pair, session: Session) -> None:
        """A session was made; the first event of it comes after this."""
        self._members[session.session] = _Member(pair, session)
        self._book.enter(session, self)
        pair.add(session)
        self.tell(SessionJoined(session.session, bool(pair.plan.groups)))

    def has(self, session: str) -> bool:
        """Whether a session of this name has joined."""
        return session in self._members

    def give(self, first_block: int, end_block: int, lease: TransferLease) -> None:
        """Pages of the engine for all sessions; those that are not taken come back at once."""
        if (lease.first_block, lease.end_block) != (first_block, end_block):
            self.fail(
                f"expected a lease of blocks [{first_block}, {end_block}), got "
                f"[{lease.first_block}, {lease.end_block})"
            )
        self.tell(PagesGiven(lease))

    def tell(self, event: LocalEvent) -> None:
        """Something happened on this side; what cannot happen here fails the request."""
        try:
            commands = self.core.handle(event)
        except (InvalidTransition, ValueError) as error:
            if isinstance(event, PagesGiven) and isinstance(error, InvalidTransition):
                self._book.deliver(LeaseEnded(self.request_id, event.lease))
            self.fail(str(error))
            return
        self._queue.extend(commands)
        self._carry_out()

    def fail(self, reason: str) -> None:
        """This side used the request wrongly, or cannot go on with it."""
        logger.error("request %s: %s", self.request_id, reason)
        self.tell(FailureReported(reason))

    def heard(self, session: Session, event: AgentEvent, cause: object) -> None:
        """A report of one of the sessions."""
        if isinstance(event, SessionEnded) and event.outcome is not Outcome.SUCCEEDED:
            self._failure_kind = self._failure_kind or failure_kind(cause)
        self._queue.extend(self.core.heard(session.session, event))
        self._carry_out()

    def _carry_out(self) -> None:
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._queue:
                self._perform(self._queue.popleft())
        finally:
            self._carrying_out = False
        if self.core.state is RequestState.OVER:
            self._book.leave(self)

    def _perform(self, command: RequestCommand) -> None:
        match command:
            case ReportRequest():
                self._count(command.event)
                self._book.deliver(command.event)
            case Tell():
                member = self._members[command.session]
                try:
                    member.pair.drive(member.session, command.event)
                except InvalidTransition as error:
                    self.fail(str(error))
            case GivePages():
                member = self._members[command.session]
                try:
                    member.pair.drive(member.session, self._pages(member.pair, command.lease))
                except (InvalidTransition, ValueError) as error:
                    logger.exception("request %s", self.request_id)
                    self.tell(PagesRefused(command.session, command.lease, str(error)))
            case _:
                assert_never(command)

    def _pages(self, pair: Pair, lease: TransferLease) -> PagesReady | ShipRequested:
        pages = self._book.pages
        if self.side is Side.GENERATION:
            blocks = pages.to_receive(pair.plan, lease, self.prompt_tokens)
            return PagesReady(lease.end_block, blocks)
        blocks = pages.to_send(pair.plan, lease, self.prompt_tokens)
        return ShipRequested(lease.first_block, lease.end_block, blocks)

    def _count(self, event: AgentEvent) -> None:
        counters = self._book.counters
        match event:
            case SessionEnded():
                counters.bytes_total += event.transferred_bytes
                counters.blocks_total += event.transferred_blocks
                if event.outcome is not Outcome.SUCCEEDED:
                    counters.failures[self._failure_kind or "protocol"] += 1
            case LeaseInDoubt():
                self._doubtful.append(event.lease)
                counters.leases_in_doubt += 1
            case LeaseEnded():
                left = [lease for lease in self._doubtful if lease is not event.lease]
                counters.leases_in_doubt -= len(self._doubtful) - len(left)
                self._doubtful = left
            case _:
                pass


class RequestBook:
    """Every request that is not over, by side and id, and by session."""

    def __init__(
        self,
        *,
        pages: LeasedPages,
        counters: TransferCounters,
        deliver: Callable[[AgentEvent], None],
        over: Callable[[RunningRequest], None],
    ) -> None:
        """``over`` is told of a request of which nothing is left."""
        self.pages: Final = pages
        self.counters: Final = counters
        self.deliver: Final = deliver
        self._over = over
        self._current: dict[tuple[Side, str], RunningRequest] = {}
        self._by_session: dict[Session, RunningRequest] = {}

    def current(self, side: Side, request_id: str) -> RunningRequest | None:
        """The last request of this id, unless it is over."""
        return self._current.get((side, request_id))

    def undecided(self, side: Side, request_id: str) -> RunningRequest | None:
        """The same, unless its outcome was reported."""
        running = self.current(side, request_id)
        return running if running is not None and running.core.undecided else None

    @property
    def all(self) -> tuple[RunningRequest, ...]:
        """Every request that has a session."""
        return tuple(dict.fromkeys(self._by_session.values()))

    def open(self, side: Side, core: RequestTransfer, prompt_tokens: int | None) -> RunningRequest:
        """A new request. An earlier one of its id goes on until its leases are over."""
        running = RunningRequest(side, core, prompt_tokens, self)
        self._current[side, core.request_id] = running
        return running

    def enter(self, session: Session, running: RunningRequest) -> None:
        """A session of a request."""
        self._by_session[session] = running

    def heard(self, session: Session, event: AgentEvent, cause: object) -> None:
        """A report of a session, and what the session was told that made it report."""
        self._by_session[session].heard(session, event, cause)

    def leave(self, running: RunningRequest) -> None:
        """Nothing of this request is left."""
        for session in running.sessions:
            self._by_session.pop(session, None)
        key = (running.side, running.request_id)
        if self._current.get(key) is running:
            del self._current[key]
            self._over(running)
