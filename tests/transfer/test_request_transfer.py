"""Sessions of a request become one transfer: one end, leases that end once, minima and sums."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.agent_rig import Lease, lease
from tests.transfer.sessions import DATA, PEER
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
    SessionEnded,
)
from transfer.outcome import Outcome
from transfer.request_transfer import (
    REQUEST_IMPOSSIBLE,
    REQUEST_TRANSITIONS,
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
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    FailureReported,
    HandOffRequested,
)
from transfer.story import InvalidTransition

S = RequestState
GONE = CancelRequested("gone")


def ended(outcome: Outcome, reason: str = "", moved: tuple[int, int] = (0, 0)) -> SessionEnded:
    return SessionEnded("r", outcome, reason, *moved)


def reports(commands: tuple[RequestCommand, ...]) -> list[AgentEvent]:
    return [command.event for command in commands if isinstance(command, ReportRequest)]


def told(commands: tuple[RequestCommand, ...]) -> list[tuple[str, object]]:
    return [(command.session, command.event) for command in commands if isinstance(command, Tell)]


def opened(*sessions: str, leading: str | None = None, without_pages: str = "") -> RequestTransfer:
    """A request whose sessions are all there."""
    request = RequestTransfer("r", len(sessions), leading)
    for session in sessions:
        request.handle(SessionJoined(session, session not in without_pages))
    assert request.state is S.OPEN
    return request


def test_every_pair_is_handled_or_declared_impossible() -> None:
    declared = {(state, event) for state, kinds in REQUEST_IMPOSSIBLE.items() for event in kinds}
    events = (*get_args(LocalEvent), *get_args(AgentEvent))
    assert set(REQUEST_IMPOSSIBLE) == set(S)
    assert not declared & set(REQUEST_TRANSITIONS)
    assert declared | set(REQUEST_TRANSITIONS) == {
        (state, event) for state in S for event in events
    }


def test_an_impossible_event_raises_and_changes_nothing() -> None:
    request = opened("a")
    with pytest.raises(InvalidTransition, match="SessionJoined cannot happen in state OPEN"):
        request.handle(SessionJoined("b", has_pages=True))
    assert (request.state, request.missing) == (S.OPEN, 0)
    with pytest.raises(ValueError, match="at least one session"):
        RequestTransfer("r", 0)


def test_a_grant_is_told_when_all_receivers_have_granted() -> None:
    request = RequestTransfer("r", 2)
    request.handle(SessionJoined("a", has_pages=True))
    assert request.heard("a", GrantReceived("r", PEER)) == ()
    assert (request.state, request.missing) == (S.GATHERING, 1)
    request.handle(SessionJoined("b", has_pages=True))
    assert reports(request.heard("b", GrantReceived("r", PEER))) == [GrantReceived("r", PEER)]
    assert request.state is S.OPEN


def test_a_request_that_ends_before_all_have_granted_says_how() -> None:
    request = RequestTransfer("r", 3)
    request.handle(SessionJoined("a", has_pages=True))
    end = ended(Outcome.FAILED, "deadline")
    assert reports(request.heard("a", end)) == [end]
    assert (request.state, request.missing) == (S.OVER, 2)
    assert request.ending == (Outcome.FAILED, "deadline")


def test_the_announcement_is_told_once_when_all_have_announced() -> None:
    request = opened("a", "b")
    assert request.heard("a", AnnounceReceived("r")) == ()
    assert reports(request.heard("b", AnnounceReceived("r"))) == [AnnounceReceived("r")]


def test_a_prefix_is_found_once_when_all_ranks_of_the_source_have_the_same() -> None:
    request = opened("a", "b")
    assert request.heard("a", PrefixFoundReceived("r", 4)) == ()
    found = PrefixFoundReceived("r", 4)
    assert reports(request.heard("b", found)) == [found]


@pytest.mark.parametrize("found_first", [False, True])
@pytest.mark.parametrize("other", [PrefixFoundReceived("r", 3), ended(Outcome.SUCCEEDED)])
def test_ranks_of_a_source_that_differ_fail_the_pull_at_once(
    other: AgentEvent, *, found_first: bool
) -> None:
    request = opened("a", "b")
    words = [("a", PrefixFoundReceived("r", 4)), ("b", other)]
    first, second = words if found_first else reversed(words)
    assert request.heard(*first) == ()
    commands = request.heard(*second)
    assert not reports(commands)
    assert request.ending is not None
    assert request.ending[0] is Outcome.FAILED
    left = {session for session, event in told(commands) if isinstance(event, FailureReported)}
    assert left == ({"a"} if isinstance(other, SessionEnded) else {"a", "b"})


def test_a_pull_that_all_ranks_decline_succeeds_without_pages() -> None:
    request = opened("a", "b", leading="a")
    declined = ended(Outcome.SUCCEEDED, "declined: not here")
    assert request.heard("b", declined) == ()
    assert reports(request.heard("a", declined)) == [declined]
    assert request.state is S.OVER


def test_a_chunk_is_in_when_it_is_in_from_every_session_that_has_pages() -> None:
    request = opened("a", "b", "c", without_pages="c")
    assert request.heard("a", ChunkReceived("r", 4)) == ()
    assert reports(request.heard("b", ChunkReceived("r", 2))) == [ChunkReceived("r", 2)]
    assert request.heard("a", ChunkReceived("r", 6)) == ()
    assert reports(request.heard("b", ChunkReceived("r", 6))) == [ChunkReceived("r", 6)]


def test_verbs_go_to_every_session() -> None:
    request = opened("a", "b")
    event = AnnounceRequested()
    assert told(request.handle(event)) == [("a", event), ("b", event)]
    request.heard("a", ended(Outcome.SUCCEEDED))
    assert told(request.handle(HandOffRequested(None))) == [("b", HandOffRequested(None))]


def test_all_handoffs_become_one_with_the_leaders_data() -> None:
    request = opened("a", "b", leading="b")
    request.heard("a", HandoffReceived("r", None))
    assert request.heard("a", ended(Outcome.SUCCEEDED, "received", (10, 3))) == ()
    request.heard("b", HandoffReceived("r", DATA))
    assert reports(request.heard("b", ended(Outcome.SUCCEEDED, "received", (7, 4)))) == [
        HandoffReceived("r", DATA),
        ended(Outcome.SUCCEEDED, "received", (17, 4)),
    ]
    assert request.state is S.OVER


def test_a_rank_that_no_leader_sends_to_has_no_data_but_a_leader_must() -> None:
    for leading, outcome in ((None, Outcome.SUCCEEDED), ("a", Outcome.FAILED)):
        request = opened("a", leading=leading)
        request.heard("a", HandoffReceived("r", None))
        events = reports(request.heard("a", ended(Outcome.SUCCEEDED)))
        (end,) = [event for event in events if isinstance(event, SessionEnded)]
        assert end.outcome is outcome
        assert (HandoffReceived("r", None) in events) is (outcome is Outcome.SUCCEEDED)


def test_nothing_to_decode_is_told_once_and_must_be_said_by_all() -> None:
    request = opened("a", "b")
    request.heard("a", NoDecodeReceived("r"))
    request.heard("a", ended(Outcome.SUCCEEDED))
    request.heard("b", NoDecodeReceived("r"))
    events = reports(request.heard("b", ended(Outcome.SUCCEEDED, "nothing to decode")))
    assert [type(event) for event in events] == [NoDecodeReceived, SessionEnded]
    mixed = opened("a", "b")
    mixed.heard("a", NoDecodeReceived("r"))
    mixed.heard("a", ended(Outcome.SUCCEEDED))
    mixed.heard("b", HandoffReceived("r", DATA))
    (end,) = reports(mixed.heard("b", ended(Outcome.SUCCEEDED)))
    assert isinstance(end, SessionEnded)
    assert (end.outcome, "others had nothing" in end.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize(
    ("first", "event"),
    [
        (Outcome.FAILED, FailureReported("why")),
        (Outcome.CANCELLED, CancelRequested("why")),
    ],
)
def test_one_session_that_ends_badly_ends_the_others(first: Outcome, event: object) -> None:
    request = opened("a", "b", "c")
    request.heard("a", ended(Outcome.SUCCEEDED))
    commands = request.heard("b", ended(first, "why"))
    assert told(commands) == [("c", event)]
    assert reports(commands) == []
    assert request.undecided
    assert reports(request.heard("c", ended(first, "why"))) == [ended(first, "why")]
    assert not request.undecided


def test_failed_wins_over_cancelled() -> None:
    request = opened("a", "b")
    assert [session for session, _ in told(request.handle(GONE))] == ["a", "b"]
    request.heard("a", ended(Outcome.CANCELLED, "gone"))
    assert reports(request.heard("b", ended(Outcome.FAILED, "lost"))) == [
        ended(Outcome.FAILED, "lost")
    ]


def test_a_second_cancel_and_verbs_after_the_end_are_ignored() -> None:
    request = opened("a")
    request.handle(GONE)
    assert request.handle(GONE) == ()
    request.heard("a", ended(Outcome.CANCELLED, "gone"))
    assert request.state is S.OVER
    assert request.handle(AnnounceRequested()) == ()
    late = lease(0, [1])
    assert reports(request.handle(PagesGiven(late))) == [LeaseEnded("r", late)]


def test_a_lease_ends_when_it_has_for_every_session() -> None:
    request, pages = opened("a", "b"), lease(0, [1])
    assert request.handle(PagesGiven(pages)) == (GivePages("a", pages), GivePages("b", pages))
    with pytest.raises(ValueError, match="give each once"):
        request.handle(PagesGiven(pages))
    assert request.heard("a", LeaseEnded("r", pages)) == ()
    request.heard("a", ended(Outcome.SUCCEEDED))
    assert len(reports(request.heard("b", ended(Outcome.SUCCEEDED)))) == 1
    states = [request.state]
    assert reports(request.heard("b", LeaseEnded("r", pages))) == [LeaseEnded("r", pages)]
    assert [*states, request.state] == [S.DECIDED, S.OVER]


def test_a_lease_is_in_doubt_when_it_is_for_any_session_and_is_told_once() -> None:
    request, pages = opened("a", "b"), lease(0, [1])
    request.handle(PagesGiven(pages))
    doubt = LeaseInDoubt("r", pages, "lost")
    assert reports(request.heard("a", doubt)) == [doubt]
    assert request.heard("b", LeaseInDoubt("r", pages, "lost too")) == ()
    assert request.heard("b", LeaseEnded("r", pages)) == ()
    assert reports(request.heard("a", LeaseEnded("r", pages))) == [LeaseEnded("r", pages)]


def test_pages_that_a_session_refuses_end_the_request_and_come_back() -> None:
    request, pages = opened("a", "b"), lease(0, [1])
    request.handle(PagesGiven(pages))
    commands = request.handle(PagesRefused("a", pages, "wrong"))
    assert told(commands) == [("a", FailureReported("wrong")), ("b", FailureReported("wrong"))]
    for session in ("a", "b"):
        request.heard(session, ended(Outcome.FAILED, "wrong"))
    states = [request.state]
    assert reports(request.heard("b", LeaseEnded("r", pages))) == [LeaseEnded("r", pages)]
    assert [*states, request.state] == [S.DECIDED, S.OVER]


@dataclass
class Fake:
    """A session as its contract says: one end, after which only leases are told."""

    name: str
    over: bool = False
    leases: list[Lease] = field(default_factory=list)
    doubtful: set[int] = field(default_factory=set)


class Machine:
    """Random sessions under a request; carries out what the request commands."""

    def __init__(self, random: Random) -> None:
        self.random = random
        names = [f"s{number}" for number in range(random.randint(1, 4))]
        self.request = RequestTransfer("r", len(names))
        self.sessions = {name: Fake(name) for name in names}
        self.events: list[AgentEvent] = []
        self.given: list[Lease] = []
        for name in names:
            self.carry_out(self.request.handle(SessionJoined(name, has_pages=True)))

    def carry_out(self, commands: tuple[RequestCommand, ...]) -> None:
        for command in commands:
            match command:
                case ReportRequest(event):
                    self.events.append(event)
                case Tell(session, CancelRequested() | FailureReported() as event):
                    cancelled = isinstance(event, CancelRequested)
                    self.end(session, Outcome.CANCELLED if cancelled else Outcome.FAILED)
                case Tell():
                    pass
                case GivePages(session, pages):
                    self.give(self.sessions[session], pages)

    def give(self, session: Fake, pages: object) -> None:
        assert isinstance(pages, Lease)
        if session.over:
            self.hear(session.name, LeaseEnded("r", pages))
        elif self.random.random() < 0.1:
            self.carry_out(self.request.handle(PagesRefused(session.name, pages, "refused")))
        else:
            session.leases.append(pages)

    def hear(self, session: str, event: AgentEvent) -> None:
        self.carry_out(self.request.heard(session, event))

    def end(self, name: str, outcome: Outcome) -> None:
        session = self.sessions[name]
        if not session.over:
            session.over = True
            self.hear(name, ended(outcome, outcome.value, (1, 1)))

    def step(self) -> None:
        session = self.random.choice(list(self.sessions.values()))
        match self.random.randint(0, 9):
            case 0:
                self.end(session.name, self.random.choice([Outcome.FAILED, Outcome.CANCELLED]))
            case 1:
                self.end(session.name, Outcome.SUCCEEDED)
            case 2:
                self.carry_out(self.request.handle(GONE))
            case 3 | 4 | 5 | 6:
                pages = lease(0, [1])
                self.given.append(pages)
                self.carry_out(self.request.handle(PagesGiven(pages)))
            case 7 if session.leases:
                pages = self.random.choice(session.leases)
                if id(pages) not in session.doubtful:
                    session.doubtful.add(id(pages))
                    self.hear(session.name, LeaseInDoubt("r", pages, "lost"))
            case _ if session.leases:
                self.hear(session.name, LeaseEnded("r", session.leases.pop()))
            case _:
                pass

    def finish(self) -> None:
        for session in self.sessions.values():
            self.end(session.name, Outcome.SUCCEEDED)
        for session in self.sessions.values():
            while session.leases:
                self.hear(session.name, LeaseEnded("r", session.leases.pop()))


@settings(max_examples=200, deadline=None)
@given(random=st.randoms(use_true_random=False), steps=st.integers(0, 30))
def test_whatever_happens_the_request_ends_once_and_every_lease_once(
    random: Random, steps: int
) -> None:
    machine = Machine(random)
    for _ in range(steps):
        machine.step()
    machine.finish()
    assert machine.request.state is S.OVER
    (end,) = [event for event in machine.events if isinstance(event, SessionEnded)]
    assert end.transferred_bytes == len(machine.sessions)
    homes = Counter(id(event.lease) for event in machine.events if isinstance(event, LeaseEnded))
    assert homes == {id(pages): 1 for pages in machine.given}
    doubts = [id(event.lease) for event in machine.events if isinstance(event, LeaseInDoubt)]
    assert len(doubts) == len(set(doubts))
