"""All sessions that one rank has for a request, as the one transfer that the engine sees.

Sans-IO: ``heard`` takes what a session reports, ``handle`` what this side does, and both answer
with commands. The outcome is reported when that of every session is known; one session that ends
badly ends the others at once. A lease is shared by the sessions that were given it: it has ended
when it has for each of them, and is in doubt when it is for any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.lease import TransferLease
from transfer.outcome import Outcome
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    DeclineRequested,
    FailureReported,
    FoundRequested,
    HandOffRequested,
    NoDecodeRequested,
)
from transfer.story import InvalidTransition, Story


class RequestState(Enum):
    """Where a request's transfer stands."""

    GATHERING = "gathering"
    """Some sessions are not there yet."""
    OPEN = "open"
    """All sessions are there."""
    ENDING = "ending"
    """Sessions were told to end; the outcome of some is open."""
    DECIDED = "decided"
    """The outcome was reported, a lease is not over."""
    OVER = "over"
    """Outcome reported, every lease over: the request may be forgotten."""


@dataclass(frozen=True, slots=True)
class SessionJoined:
    """A session was made for this request. ``has_pages``: whether its plan moves any."""

    session: str
    has_pages: bool


@dataclass(frozen=True, slots=True)
class PagesGiven:
    """The engine gives these pages to all sessions."""

    lease: TransferLease


@dataclass(frozen=True, slots=True)
class PagesRefused:
    """A session did not take pages that it was given."""

    session: str
    lease: TransferLease
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a session what happened on this side."""

    session: str
    event: object


@dataclass(frozen=True, slots=True)
class GivePages:
    """Give a session its part of the pages last given, or answer with ``PagesRefused``."""

    session: str
    lease: TransferLease


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Hand to the engine."""

    event: AgentEvent


RequestCommand = Tell | GivePages | ReportRequest
LocalEvent = (
    SessionJoined
    | PagesGiven
    | PagesRefused
    | AnnounceRequested
    | HandOffRequested
    | NoDecodeRequested
    | FoundRequested
    | DeclineRequested
    | CancelRequested
    | FailureReported
)
"""What happens on this side; ``AgentEvent`` is what a session reports."""


@dataclass(eq=False)
class _Member:
    """What is known of one session."""

    has_pages: bool
    granted: bool = False
    announced: bool = False
    found_block: int = 0
    """Puller: what the source has."""
    end_block: int = 0
    last_word: HandoffReceived | NoDecodeReceived | None = None
    end: SessionEnded | None = None


@dataclass(eq=False)
class _Shared:
    """A lease and the sessions for which it is not over."""

    lease: TransferLease
    holders: set[str] = field(default_factory=set)
    in_doubt: bool = False


Handler = Callable[["RequestTransfer", Any, str], None]
RequestTransitions = Mapping[tuple[RequestState, type], Handler]


class RequestTransfer:
    """The transfer of one request at one rank, over ``expected`` sessions.

    ``leading`` is the session with the leader of the context ranks where this rank leads the
    generation ranks: its handoff must bring the first tokens. None anywhere else.
    """

    def __init__(self, request_id: str, expected: int, leading: str | None = None) -> None:
        if expected < 1:
            raise ValueError(f"expected at least one session, got {expected}")
        self.request_id: Final = request_id
        self.expected: Final = expected
        self.state = RequestState.GATHERING
        self._leading = leading
        self._members: dict[str, _Member] = {}
        self._leases: dict[int, _Shared] = {}
        self._reported_block = 0
        self._why: tuple[Outcome, str] | None = None
        self._commands: list[RequestCommand] = []
        self._story: Final = Story()

    @property
    def undecided(self) -> bool:
        """Whether the engine has not been told the outcome."""
        return self.state not in (RequestState.DECIDED, RequestState.OVER)

    @property
    def ending(self) -> tuple[Outcome, str] | None:
        """How and why it ends badly, as soon as that is known."""
        return self._why

    @property
    def missing(self) -> int:
        """Sessions that have not come."""
        return self.expected - len(self._members)

    def handle(self, event: LocalEvent) -> tuple[RequestCommand, ...]:
        """What happens on this side. Raises InvalidTransition, with nothing changed, for what
        cannot happen here.
        """
        return self._take(event, "")

    def heard(self, session: str, event: AgentEvent) -> tuple[RequestCommand, ...]:
        """A report of a session that has joined. Raises likewise."""
        return self._take(event, session)

    def _take(self, event: object, session: str) -> tuple[RequestCommand, ...]:
        handler = REQUEST_TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(self.request_id, self.state, event, self._story.entries())
        before = self.state
        self._commands = []
        handler(self, event, session)
        self._settle()
        self._story.add(f"{before.name} {type(event).__name__} {session} -> {self.state.name}")
        return tuple(self._commands)

    def _report(self, event: AgentEvent) -> None:
        self._commands.append(ReportRequest(event))

    def _tell_undecided(self, event: object) -> None:
        for session, member in self._members.items():
            if member.end is None:
                self._commands.append(Tell(session, event))

    # What sessions report.

    def _on_granted(self, event: GrantReceived | PullReceived, session: str) -> None:
        self._members[session].granted = True
        if not self.missing and all(member.granted for member in self._members.values()):
            self._report(event)

    def _on_announced(self, event: AnnounceReceived, session: str) -> None:
        self._members[session].announced = True
        if all(member.announced for member in self._members.values()):
            self._report(event)

    def _on_found(self, event: PrefixFoundReceived, session: str) -> None:
        self._members[session].found_block = event.end_block
        self._end_if_sources_differ()
        if self.state is RequestState.OPEN and all(m.found_block for m in self._members.values()):
            self._report(event)

    def _end_if_sources_differ(self) -> None:
        """Ranks of a source hold the same blocks; a session over without a word was declined."""
        members = self._members.values()
        found = {member.found_block for member in members if member.found_block}
        declined = [m for m in members if m.end is not None and m.last_word is None]
        if len(found) > 1 or (found and declined):
            blocks = sorted(found | {0}) if declined else sorted(found)
            self._end(Outcome.FAILED, f"ranks of the source found {blocks} blocks of a prefix")

    def _on_chunk(self, event: ChunkReceived, session: str) -> None:
        self._members[session].end_block = event.end_block
        ends = (member.end_block for member in self._members.values() if member.has_pages)
        reached = min(ends, default=0)
        if reached > self._reported_block:
            self._reported_block = reached
            self._report(ChunkReceived(self.request_id, reached))

    def _on_last_word(self, event: HandoffReceived | NoDecodeReceived, session: str) -> None:
        self._members[session].last_word = event

    def _on_session_ended(self, event: SessionEnded, session: str) -> None:
        self._members[session].end = event
        if event.outcome is not Outcome.SUCCEEDED:
            self._end(event.outcome, event.reason)
        self._end_if_sources_differ()
        if all(member.end is not None for member in self._members.values()) and (
            self.state is RequestState.ENDING or not self.missing
        ):
            self._decide()

    def _on_lease_ended(self, event: LeaseEnded, session: str) -> None:
        shared = self._leases[id(event.lease)]
        shared.holders.discard(session)
        if not shared.holders:
            del self._leases[id(event.lease)]
            self._report(event)

    def _on_lease_in_doubt(self, event: LeaseInDoubt, _session: str) -> None:
        shared = self._leases[id(event.lease)]
        if not shared.in_doubt:
            shared.in_doubt = True
            self._report(event)

    # What happens on this side.

    def _on_joined(self, event: SessionJoined, _session: str) -> None:
        self._members[event.session] = _Member(event.has_pages)
        if not self.missing:
            self.state = RequestState.OPEN

    def _on_pages(self, event: PagesGiven, _session: str) -> None:
        if id(event.lease) in self._leases:
            raise ValueError("expected a lease that no session holds yet; give each once")
        self._leases[id(event.lease)] = _Shared(event.lease, set(self._members))
        self._commands.extend(GivePages(session, event.lease) for session in self._members)

    def _on_late_pages(self, event: PagesGiven, _session: str) -> None:
        self._report(LeaseEnded(self.request_id, event.lease))

    def _on_refused(self, event: PagesRefused, _session: str) -> None:
        self._on_lease_ended(LeaseEnded(self.request_id, event.lease), event.session)
        self._end(Outcome.FAILED, event.reason)

    def _on_verb(self, event: object, _session: str) -> None:
        self._tell_undecided(event)

    def _on_cancel(self, event: CancelRequested, _session: str) -> None:
        self._end(Outcome.CANCELLED, event.reason)

    def _on_failure(self, event: FailureReported, _session: str) -> None:
        self._end(Outcome.FAILED, event.reason)

    # How it ends.

    def _end(self, outcome: Outcome, reason: str) -> None:
        """End every session, unless they have been told already."""
        if self.state not in (RequestState.GATHERING, RequestState.OPEN):
            return
        self.state = RequestState.ENDING
        self._why = (outcome, reason)
        if outcome is Outcome.CANCELLED:
            self._tell_undecided(CancelRequested(reason))
        else:
            self._tell_undecided(FailureReported(reason))

    def _decide(self) -> None:
        """The outcome of every session is known: failed wins over cancelled over succeeded."""
        ends = [member.end for member in self._members.values() if member.end is not None]
        outcome, reason = self._why or (Outcome.SUCCEEDED, ends[0].reason)
        for end in ends:
            if end.outcome is Outcome.FAILED and outcome is not Outcome.FAILED:
                outcome, reason = end.outcome, end.reason
        if outcome is Outcome.SUCCEEDED:
            outcome, reason = self._last_words(reason)
        self.state = RequestState.DECIDED
        self._report(
            SessionEnded(
                self.request_id,
                outcome,
                reason,
                sum(end.transferred_bytes for end in ends),
                max(end.transferred_blocks for end in ends),
            )
        )

    def _last_words(self, reason: str) -> tuple[Outcome, str]:
        """Report what the context ranks said last. Nothing on the context side."""
        words = {session: member.last_word for session, member in self._members.items()}
        handoffs = [word for word in words.values() if isinstance(word, HandoffReceived)]
        if not handoffs:
            if any(word is not None for word in words.values()):
                self._report(NoDecodeReceived(self.request_id))
            return Outcome.SUCCEEDED, reason
        if len(handoffs) != len(words):
            return Outcome.FAILED, "some context ranks handed off, others had nothing to decode"
        data = next((word.data for word in handoffs if word.data is not None), None)
        if self._leading is not None and data is None:
            return Outcome.FAILED, "the leader of the context ranks handed off no first tokens"
        self._report(HandoffReceived(self.request_id, data))
        return Outcome.SUCCEEDED, reason

    def _settle(self) -> None:
        if self.state is RequestState.DECIDED and not self._leases:
            self.state = RequestState.OVER


def _ignore(_request: RequestTransfer, _event: object, _session: str) -> None:
    """Handler of what no longer matters."""


_S = RequestState
_R = RequestTransfer
_ACCESS: Final[Mapping[type, Handler]] = {
    LeaseEnded: _R._on_lease_ended,
    LeaseInDoubt: _R._on_lease_in_doubt,
}
_VERBS: Final[Mapping[type, Handler]] = dict.fromkeys(
    (
        AnnounceRequested,
        HandOffRequested,
        NoDecodeRequested,
        FoundRequested,
        DeclineRequested,
    ),
    _R._on_verb,
)
_LATE_VERBS: Final[Mapping[type, Handler]] = {
    **dict.fromkeys(
        (
            AnnounceRequested,
            HandOffRequested,
            NoDecodeRequested,
            FoundRequested,
            DeclineRequested,
            CancelRequested,
            FailureReported,
        ),
        _ignore,
    ),
    PagesGiven: _R._on_late_pages,
}
_PROGRESS: Final = (
    GrantReceived,
    PullReceived,
    AnnounceReceived,
    PrefixFoundReceived,
    ChunkReceived,
    HandoffReceived,
    NoDecodeReceived,
)
_BY_STATE: Final[Mapping[RequestState, Mapping[type, Handler]]] = {
    _S.GATHERING: {
        SessionJoined: _R._on_joined,
        GrantReceived: _R._on_granted,
        PullReceived: _R._on_granted,
        SessionEnded: _R._on_session_ended,
        CancelRequested: _R._on_cancel,
        FailureReported: _R._on_failure,
    },
    _S.OPEN: {
        **_ACCESS,
        **_VERBS,
        GrantReceived: _R._on_granted,
        PullReceived: _R._on_granted,
        AnnounceReceived: _R._on_announced,
        PrefixFoundReceived: _R._on_found,
        ChunkReceived: _R._on_chunk,
        HandoffReceived: _R._on_last_word,
        NoDecodeReceived: _R._on_last_word,
        SessionEnded: _R._on_session_ended,
        PagesGiven: _R._on_pages,
        PagesRefused: _R._on_refused,
        CancelRequested: _R._on_cancel,
        FailureReported: _R._on_failure,
    },
    _S.ENDING: {
        **_ACCESS,
        **_LATE_VERBS,
        **dict.fromkeys(_PROGRESS, _ignore),
        SessionEnded: _R._on_session_ended,
        PagesRefused: _R._on_refused,
    },
    _S.DECIDED: {
        **_ACCESS,
        **_LATE_VERBS,
        PagesRefused: _R._on_refused,
    },
    _S.OVER: _LATE_VERBS,
}
REQUEST_TRANSITIONS: Final[RequestTransitions] = {
    (state, event): handler
    for state, handlers in _BY_STATE.items()
    for event, handler in handlers.items()
}
REQUEST_IMPOSSIBLE: Final[Mapping[RequestState, frozenset[type]]] = {
    # The engine is told of the request, and pages are given, when all sessions are there.
    _S.GATHERING: frozenset(
        {
            *(set(_PROGRESS) - {GrantReceived, PullReceived}),
            *_ACCESS,
            *_VERBS,
            PagesGiven,
            PagesRefused,
        }
    ),
    # A session more than expected is the shell's to refuse, as is one that comes too late.
    _S.OPEN: frozenset({SessionJoined}),
    _S.ENDING: frozenset({SessionJoined}),
    # Every session has had its outcome.
    _S.DECIDED: frozenset({SessionJoined, SessionEnded, *_PROGRESS}),
    _S.OVER: frozenset({SessionJoined, SessionEnded, PagesRefused, *_PROGRESS, *_ACCESS}),
}
"""Pairs that raise InvalidTransition; with the transitions they make up every pair."""
