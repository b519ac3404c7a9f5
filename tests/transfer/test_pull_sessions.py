"""Both ends of a prefix pull, event by event."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.transfer.sessions import (
    CHUNK,
    COSTS,
    LAST_CHUNK,
    LIMITS,
    PEER,
    READY,
    TAG,
    end_posts,
    of_type,
    pages_ready,
    posted,
    reported,
    sent,
    ship,
)
from tests.transfer.small_plans import PLAN
from transfer.agent_events import (
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.messages import (
    CancelSession,
    ChunkSent,
    Handoff,
    HandoffData,
    PrefixFound,
    Pull,
    PullDeclined,
    Received,
    SenderFailed,
)
from transfer.outcome import Access, Outcome, PeerFate
from transfer.prefix import Prefix
from transfer.pull_session import PullSession
from transfer.session import SessionState
from transfer.session_commands import ArmDeadline, DropPeer, PostSends
from transfer.session_events import (
    CancelRequested,
    DeadlinePassed,
    DeclineRequested,
    FoundRequested,
    HandOffRequested,
    PeerLost,
    PullRequested,
)
from transfer.source_session import SourceSession
from transfer.wire import pack_ints

S = SessionState
PREFIX = Prefix(b"scope", np.arange(40, dtype=np.int32))
PULL = Pull(
    request_id="r",
    session="s",
    scope=b"scope",
    tokens=pack_ints(range(40)),
    least_blocks=2,
    deadline_ms=1_000,
)
NO_TOKENS = HandoffData(choices=(), cached_tokens=40)


def puller() -> PullSession:
    return PullSession(request_id="r", session="s", peer=PEER, plan=PLAN, limits=LIMITS, tag=TAG)


def source() -> SourceSession:
    return SourceSession(
        request_id="r", session="s", peer=PEER, plan=PLAN, limits=LIMITS, costs=COSTS
    )


def asked() -> PullSession:
    session = puller()
    session.handle(PullRequested(PREFIX, 2, 1_000), 0)
    return session


def asked_source() -> SourceSession:
    session = source()
    session.handle(PULL, 0)
    return session


def test_the_puller_from_pull_to_received() -> None:
    session = puller()
    commands = session.handle(PullRequested(PREFIX, 2, 1_000), 5)
    assert sent(commands) == [PULL]
    assert of_type(commands, ArmDeadline) == [ArmDeadline(1_005)]
    found = session.handle(PrefixFound(session="s", end_block=4), 6)
    assert reported(found) == [PrefixFoundReceived("r", 4)]
    ready = pages_ready()
    assert sent(session.handle(ready, 7)) == [READY]
    posts = posted(session.handle(CHUNK, 8)) + posted(session.handle(LAST_CHUNK, 8))
    assert session.handle(Handoff(session="s", data=NO_TOKENS), 9) == ()
    commands = end_posts(session, posts, now_ms=10)
    assert sent(commands) == [Received(session="s")]
    assert reported(commands) == [
        ChunkReceived("r", 3),
        ChunkReceived("r", 4),
        HandoffReceived("r", NO_TOKENS),
        SessionEnded("r", Outcome.SUCCEEDED, "received", 272, 3),
        LeaseEnded("r", ready.blocks.lease),
    ]
    assert session.closed


def test_an_answer_that_comes_again_changes_nothing() -> None:
    """As an announcement does: the session goes on, the engine is told once."""
    session, found = asked(), PrefixFound(session="s", end_block=4)
    assert reported(session.handle(found, 1)) == [PrefixFoundReceived("r", 4)]
    assert session.handle(found, 1) == ()
    for event in (pages_ready(), CHUNK, LAST_CHUNK, Handoff(session="s", data=NO_TOKENS)):
        session.handle(event, 2)
        assert session.handle(found, 3) == ()
    assert session.state is S.COMPLETING


def test_the_source_from_pull_to_received() -> None:
    session = source()
    (event,) = reported(session.handle(PULL, 0))
    assert isinstance(event, PullReceived)
    assert (event.request_id, event.puller, event.least_blocks) == ("r", PEER, 2)
    assert event.prefix.scope == PREFIX.scope
    assert event.prefix.tokens.tolist() == PREFIX.tokens.tolist()
    assert sent(session.handle(FoundRequested(4), 1)) == [PrefixFound(session="s", end_block=4)]
    lease = ship(0, 4)
    assert session.handle(lease, 1) == ()
    assert session.handle(HandOffRequested(NO_TOKENS), 1) == ()
    assert session.access is Access.NOT_SUBMITTED
    commands = session.handle(READY, 2)
    assert len(of_type(commands, PostSends)) == 1
    assert [type(message) for message in sent(commands)] == [ChunkSent, Handoff]
    ended = end_posts(session, posted(commands), now_ms=3)
    assert reported(ended) == [LeaseEnded("r", lease.blocks.lease)]
    (event,) = reported(session.handle(Received(session="s"), 4))
    assert isinstance(event, SessionEnded)
    assert event.outcome is Outcome.SUCCEEDED
    assert session.closed


def test_declining_is_no_failure_and_moves_nothing() -> None:
    session = asked_source()
    commands = session.handle(DeclineRequested("not here"), 1)
    assert sent(commands) == [PullDeclined(session="s", reason="not here")]
    assert reported(commands) == [SessionEnded("r", Outcome.SUCCEEDED, "declined: not here", 0, 0)]
    assert session.closed
    other = asked()
    assert reported(other.handle(PullDeclined(session="s", reason="not here"), 2)) == [
        SessionEnded("r", Outcome.SUCCEEDED, "declined: not here", 0, 0)
    ]
    assert other.closed


@pytest.mark.parametrize("late", [PrefixFound(session="s", end_block=4), "declined"])
def test_a_pull_cancelled_while_the_answer_is_on_its_way(late: object) -> None:
    session = asked()
    commands = session.handle(CancelRequested("gone"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="gone")]
    assert session.outcome is Outcome.CANCELLED
    answer = PullDeclined(session="s", reason="x") if late == "declined" else late
    assert session.handle(answer, 2) == ()
    assert session.closed


def test_a_source_cancelled_by_its_peer_gives_the_lease_of_a_late_answer_back() -> None:
    session = asked_source()
    commands = session.handle(CancelSession(session="s", reason="gone"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="gone")]
    assert session.closed
    assert session.handle(FoundRequested(4), 2) == ()
    late = ship(0, 4)
    assert reported(session.handle(late, 2)) == [LeaseEnded("r", late.blocks.lease)]
    assert session.handle(HandOffRequested(NO_TOKENS), 2) == ()
    assert session.handle(DeclineRequested("x"), 2) == ()


def test_a_cancel_between_found_and_ready_returns_the_lease_untouched() -> None:
    session = asked_source()
    lease = ship(0, 4)
    for event in (FoundRequested(4), lease, HandOffRequested(NO_TOKENS)):
        session.handle(event, 1)
    commands = session.handle(CancelSession(session="s", reason="gone"), 2)
    assert LeaseEnded("r", lease.blocks.lease) in reported(commands)
    assert not of_type(commands, PostSends)
    assert session.closed


@pytest.mark.parametrize("make", [asked, asked_source])
def test_a_lost_peer_ends_a_pull_that_waits_for_its_answer(
    make: Callable[[], PullSession | SourceSession],
) -> None:
    session = make()
    (event,) = reported(session.handle(PeerLost("cut", PeerFate.UNKNOWN), 1))
    assert event == SessionEnded("r", Outcome.FAILED, "cut", 0, 0)
    assert session.closed


def test_a_source_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    session = asked()
    commands = session.handle(DeadlinePassed(), 1_000)
    assert session.outcome is Outcome.FAILED
    assert [type(message) for message in sent(commands)] == [CancelSession]


def test_a_puller_that_says_no_more_keeps_the_pages_no_longer_than_the_source_allows() -> None:
    """It beats, so the connection lives, and it may have asked for any deadline."""
    session = source()
    session.handle(PULL.model_copy(update={"deadline_ms": 10**9}), 0)
    lease = ship(0, 4)
    commands = session.handle(FoundRequested(4), 100)
    assert of_type(commands, ArmDeadline) == [ArmDeadline(100 + LIMITS.floor_ms)]
    for event in (lease, HandOffRequested(NO_TOKENS)):
        session.handle(event, 100)
    commands = session.handle(DeadlinePassed(), 100 + LIMITS.floor_ms)
    assert [type(message) for message in sent(commands)] == [SenderFailed]
    assert LeaseEnded("r", lease.blocks.lease) in reported(commands)


def test_a_source_that_fails_ends_the_pull() -> None:
    session = asked()
    session.handle(PrefixFound(session="s", end_block=4), 1)
    ready = pages_ready()
    session.handle(ready, 2)
    commands = session.handle(SenderFailed(session="s", reason="page gone"), 3)
    assert reported(commands) == [
        SessionEnded("r", Outcome.FAILED, "sender failed: page gone", 0, 0),
        LeaseEnded("r", ready.blocks.lease),
    ]


def test_ragged_tokens_break_the_connection() -> None:
    session = source()
    commands = session.handle(PULL.model_copy(update={"tokens": b"123"}), 0)
    assert of_type(commands, DropPeer)
    assert session.outcome is Outcome.FAILED
