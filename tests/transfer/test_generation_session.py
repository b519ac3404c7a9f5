"""The receiving session, event by event."""

from __future__ import annotations

import pytest

from tests.transfer.sessions import (
    CHUNK,
    DATA,
    LAST_CHUNK,
    READY,
    TAG,
    end_posts,
    generation,
    generation_at,
    lease_of,
    of_type,
    pages_ready,
    posted,
    reported,
    sent,
)
from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    SessionEnded,
)
from transfer.messages import (
    Announce,
    CancelSession,
    ChunkSent,
    Grant,
    GroupRuns,
    Handoff,
    NoDecode,
    Received,
    SenderFailed,
)
from transfer.outcome import Access, Outcome, PeerFate, PostStatus
from transfer.region import Post, Region
from transfer.session import SessionState
from transfer.session_commands import ArmDeadline, DropPeer, PostReceives
from transfer.session_events import (
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    GrantRequested,
    PagesReady,
    PeerDied,
    PeerLost,
    PostEnded,
)
from transfer.wire import pack_ints

S = SessionState


def test_from_grant_to_received() -> None:
    session = generation()
    commands = session.handle(GrantRequested(30, 1_000), 5)
    assert sent(commands) == [
        Grant(request_id="r", session="s", prompt_tokens=30, deadline_ms=1_000)
    ]
    assert of_type(commands, ArmDeadline) == [ArmDeadline(1_005)]
    assert reported(session.handle(Announce(session="s"), 6)) == [AnnounceReceived("r")]
    ready = pages_ready()
    assert sent(session.handle(ready, 7)) == [READY]

    commands = session.handle(CHUNK, 8)
    assert of_type(commands, PostReceives) == [
        PostReceives(TAG, (Post(0, Region(0, 0, 5, 2), 128), Post(1, Region(0, 1, 5, 2), 32)))
    ]
    assert session.access is Access.IN_FLIGHT
    assert reported(end_posts(session, [1])) == []
    assert reported(end_posts(session, [0])) == [ChunkReceived("r", 3)]

    commands = session.handle(LAST_CHUNK, 9)
    assert [post.region for post in of_type(commands, PostReceives)[0].posts] == [
        Region(0, 0, 9, 1),
        Region(0, 1, 9, 1),
        Region(1, 0, 3, 1),
    ]
    assert session.handle(Handoff(session="s", data=DATA), 10) == ()
    assert session.state is S.COMPLETING
    commands = end_posts(session, posted(commands))
    assert sent(commands) == [Received(session="s")]
    assert reported(commands) == [
        ChunkReceived("r", 4),
        HandoffReceived("r", DATA),
        SessionEnded("r", Outcome.SUCCEEDED, "received", 272, 3),
        LeaseEnded("r", ready.blocks.lease),
    ]
    assert session.closed
    assert session.outcome is Outcome.SUCCEEDED


def test_chunks_are_reported_in_order_though_their_bytes_overtake() -> None:
    session = generation_at(S.RECEIVING)
    later = posted(session.handle(LAST_CHUNK, 0))
    assert reported(end_posts(session, later)) == []
    assert reported(end_posts(session, [0, 1])) == [ChunkReceived("r", 3), ChunkReceived("r", 4)]


def test_access_starts_with_the_first_post() -> None:
    session = generation_at(S.ANNOUNCED)
    session.handle(pages_ready(), 0)
    assert session.access is Access.NOT_SUBMITTED


def test_nothing_to_receive_completes_with_the_handoff() -> None:
    session = generation_at(S.ANNOUNCED)
    blocks = lease_of(([], []), first_block=4)
    session.handle(PagesReady(4, blocks), 0)
    commands = session.handle(Handoff(session="s", data=DATA), 1)
    assert sent(commands) == [Received(session="s")]
    assert reported(commands) == [
        HandoffReceived("r", DATA),
        SessionEnded("r", Outcome.SUCCEEDED, "received", 0, 0),
        LeaseEnded("r", blocks.lease),
    ]
    assert session.closed


@pytest.mark.parametrize("state", [S.GRANTED, S.ANNOUNCED, S.RECEIVING, S.COMPLETING])
def test_no_decode_frees_unread_at_any_time_before_decode(state: SessionState) -> None:
    session = generation_at(state)
    events = reported(session.handle(NoDecode(session="s"), 1))
    assert events[0] == NoDecodeReceived("r")
    assert isinstance(events[1], SessionEnded)
    assert events[1].outcome is Outcome.SUCCEEDED
    if state in (S.RECEIVING, S.COMPLETING):
        assert session.state is S.CLOSING
        count = 2 if state is S.RECEIVING else 5
        events = reported(end_posts(session, list(range(count))))
        assert [type(event) for event in events] == [LeaseEnded]
    assert session.closed


STATES = [S.GRANTED, S.ANNOUNCED, S.RECEIVING, S.COMPLETING]


@pytest.mark.parametrize("state", STATES)
def test_a_cancellation_from_here_is_told_and_final(state: SessionState) -> None:
    session = generation_at(state)
    commands = session.handle(CancelRequested("client left"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="client left")]
    (ended,) = [event for event in reported(commands) if isinstance(event, SessionEnded)]
    assert (ended.outcome, ended.reason) == (Outcome.CANCELLED, "client left")
    assert session.handle(CancelRequested("again"), 2) == ()
    assert session.outcome is Outcome.CANCELLED


@pytest.mark.parametrize("state", STATES)
def test_a_cancellation_from_the_sender_is_answered(state: SessionState) -> None:
    session = generation_at(state)
    commands = session.handle(CancelSession(session="s", reason="client left"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="client left")]
    assert session.outcome is Outcome.CANCELLED


@pytest.mark.parametrize("state", STATES)
def test_failure_here_is_told_as_a_cancellation(state: SessionState) -> None:
    session = generation_at(state)
    commands = session.handle(FailureReported("no pages"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="no pages")]
    assert session.outcome is Outcome.FAILED


@pytest.mark.parametrize("state", STATES)
def test_failure_of_the_sender_ends_the_session(state: SessionState) -> None:
    session = generation_at(state)
    commands = session.handle(SenderFailed(session="s", reason="out of memory"), 1)
    assert session.outcome is Outcome.FAILED
    (ended,) = [event for event in reported(commands) if isinstance(event, SessionEnded)]
    assert ended.reason == "sender failed: out of memory"


def test_after_a_cancellation_announced_runs_are_still_received() -> None:
    session = generation_at(S.RECEIVING)
    session.handle(CancelRequested("client left"), 1)
    drained = posted(session.handle(LAST_CHUNK, 2))
    assert drained == [2, 3, 4]
    assert reported(end_posts(session, [0, 1, *drained])) == []
    assert session.state is S.CLOSING
    events = reported(session.handle(CancelSession(session="s", reason="client left"), 3))
    assert [type(event) for event in events] == [LeaseEnded]
    assert session.closed
    assert session.handle(LAST_CHUNK, 4) == ()


def test_after_the_last_word_of_the_sender_the_lease_waits_for_posts_only() -> None:
    session = generation_at(S.RECEIVING)
    session.handle(SenderFailed(session="s", reason="x"), 1)
    assert session.state is S.CLOSING
    assert posted(session.handle(LAST_CHUNK, 2)) == []
    assert reported(end_posts(session, [0])) == []
    assert [type(event) for event in reported(end_posts(session, [1]))] == [LeaseEnded]


@pytest.mark.parametrize("status", [PostStatus.REVOKED, PostStatus.LOST])
def test_a_receive_that_fails_breaks_the_connection(status: PostStatus) -> None:
    session = generation_at(S.RECEIVING)
    commands = session.handle(PostEnded(0, status), 1)
    assert session.outcome is Outcome.FAILED
    assert len(of_type(commands, DropPeer)) == 1
    assert [type(message) for message in sent(commands)] == [CancelSession]


def test_a_lost_peer_that_is_dead_ends_everything_at_once() -> None:
    session = generation_at(S.RECEIVING)
    events = reported(session.handle(PeerLost("reset", PeerFate.DEAD), 1))
    assert [type(event) for event in events] == [SessionEnded, LeaseEnded]
    assert session.closed
    assert end_posts(session, [0, 1], PostStatus.LOST) == ()


def test_a_lost_peer_of_unknown_fate_leaves_doubt_until_its_death_is_known() -> None:
    session = generation_at(S.RECEIVING)
    events = reported(session.handle(PeerLost("silent", PeerFate.UNKNOWN), 1))
    assert [type(event) for event in events] == [SessionEnded]
    assert reported(end_posts(session, [0])) == []
    events = reported(end_posts(session, [1], PostStatus.LOST))
    assert [type(event) for event in events] == [LeaseInDoubt]
    assert (session.state, session.access) == (S.DOUBT, Access.IN_DOUBT)
    assert session.handle(DeadlinePassed(), 10**9) == ()
    events = reported(session.handle(PeerDied(), 2))
    assert [type(event) for event in events] == [LeaseEnded]
    assert session.closed


def test_a_lost_peer_without_open_posts_leaves_no_doubt() -> None:
    session = generation_at(S.RECEIVING)
    end_posts(session, [0, 1])
    events = reported(session.handle(PeerLost("silent", PeerFate.UNKNOWN), 1))
    assert [type(event) for event in events] == [SessionEnded, LeaseEnded]
    assert session.closed


def test_receives_that_never_end_come_in_doubt_and_out_again_by_their_own_end() -> None:
    session = generation_at(S.RECEIVING)
    session.handle(PeerLost("silent", PeerFate.UNKNOWN), 10)
    assert session.handle(DeadlinePassed(), 20) == (ArmDeadline(10 + 50 + 16),)
    events = reported(session.handle(DeadlinePassed(), 76))
    assert [type(event) for event in events] == [LeaseInDoubt]
    assert session.state is S.DOUBT
    assert reported(end_posts(session, [0], PostStatus.REVOKED)) == []
    events = reported(end_posts(session, [1], PostStatus.DONE))
    assert [type(event) for event in events] == [LeaseEnded]
    assert session.closed


def test_a_deadline_changes_the_outcome_then_drops_the_peer_and_frees_nothing() -> None:
    session = generation_at(S.RECEIVING)
    commands = session.handle(DeadlinePassed(), 116)
    (ended,) = reported(commands)
    assert isinstance(ended, SessionEnded)
    assert (ended.outcome, ended.reason) == (
        Outcome.FAILED,
        "deadline passed in state receiving",
    )
    assert sent(commands)
    assert of_type(commands, ArmDeadline) == [ArmDeadline(116 + 50 + 16)]
    commands = session.handle(DeadlinePassed(), 182)
    assert len(of_type(commands, DropPeer)) == 1
    assert reported(commands) == []
    assert session.access is Access.IN_FLIGHT


def test_the_deadline_of_bytes_under_way_moves_with_progress() -> None:
    session = generation_at(S.ANNOUNCED)
    session.handle(pages_ready(), 0)
    commands = session.handle(CHUNK, 200)
    # Floor 100 ms, and 160 bytes at 10 bytes a millisecond.
    assert of_type(commands, ArmDeadline) == [ArmDeadline(200 + 100 + 16)]
    end_posts(session, [1], now_ms=300)
    commands = session.handle(DeadlinePassed(), 316)
    assert session.outcome is Outcome.PENDING
    assert commands == (ArmDeadline(300 + 100 + 12),)


def test_posts_that_wait_behind_others_are_not_stuck_while_those_end() -> None:
    session = generation_at(S.RECEIVING)
    assert session.handle(DeadlinePassed(ahead_ms=110), 116) == (ArmDeadline(110 + 100 + 16),)
    session.handle(CancelRequested("x"), 120)
    assert session.handle(DeadlinePassed(ahead_ms=180), 186) == (ArmDeadline(180 + 50 + 16),)
    commands = session.handle(DeadlinePassed(ahead_ms=180), 246)
    assert len(of_type(commands, DropPeer)) == 1


def test_without_bytes_under_way_only_the_request_deadline_counts() -> None:
    session = generation_at(S.RECEIVING)
    end_posts(session, [0, 1])
    assert session.handle(DeadlinePassed(), 500) == (ArmDeadline(1_000),)
    session.handle(DeadlinePassed(), 1_000)
    assert session.outcome is Outcome.FAILED


def test_repeated_messages_change_nothing() -> None:
    session = generation_at(S.COMPLETING)
    for message in (Announce(session="s"), CHUNK, LAST_CHUNK, Handoff(session="s", data=DATA)):
        assert session.handle(message, 1) == ()
    assert session.state is S.COMPLETING


def test_a_repeated_chunk_is_not_received_twice() -> None:
    session = generation_at(S.RECEIVING)
    assert session.handle(CHUNK, 1) == ()
    assert session.state is S.RECEIVING


def test_late_messages_after_the_end_change_nothing() -> None:
    session = generation_at(S.GRANTED)
    session.handle(CancelRequested("x"), 0)
    assert session.closed
    for message in (
        Announce(session="s"),
        CHUNK,
        Handoff(session="s", data=DATA),
        NoDecode(session="s"),
        SenderFailed(session="s", reason="x"),
        CancelSession(session="s", reason="x"),
        PeerLost("x", PeerFate.DEAD),
        PeerDied(),
        DeadlinePassed(),
    ):
        assert session.handle(message, 1) == ()


def test_pages_that_come_after_the_end_go_back_at_once() -> None:
    session = generation_at(S.ANNOUNCED)
    session.handle(CancelSession(session="s", reason="x"), 0)
    ready = pages_ready()
    assert reported(session.handle(ready, 1)) == [LeaseEnded("r", ready.blocks.lease)]


def runs(first: int, end: int, lengths: list[int]) -> GroupRuns:
    return GroupRuns(first_block=first, end_block=end, run_blocks=pack_ints(lengths))


BAD_CHUNKS = {
    "another group count": ChunkSent(session="s", chunk=1, groups=(runs(3, 4, [1]),)),
    "a chunk left out": ChunkSent(session="s", chunk=2, groups=(runs(3, 4, [1]), runs(3, 4, [1]))),
    "blocks left out": ChunkSent(session="s", chunk=1, groups=(runs(4, 4, []), runs(3, 4, [1]))),
    "blocks again": ChunkSent(session="s", chunk=1, groups=(runs(2, 4, [1, 1]), runs(3, 4, [1]))),
    "past the end": ChunkSent(session="s", chunk=1, groups=(runs(3, 5, [2]), runs(3, 4, [1]))),
    "backwards": ChunkSent(session="s", chunk=1, groups=(runs(3, 2, []), runs(3, 4, [1]))),
    "too few blocks": ChunkSent(session="s", chunk=1, groups=(runs(3, 4, []), runs(3, 4, [1]))),
    "too many blocks": ChunkSent(session="s", chunk=1, groups=(runs(3, 4, [2]), runs(3, 4, [1]))),
    "negative run": ChunkSent(session="s", chunk=1, groups=(runs(3, 4, [2, -1]), runs(3, 4, [1]))),
    "ragged runs": ChunkSent(
        session="s",
        chunk=1,
        groups=(GroupRuns(first_block=3, end_block=4, run_blocks=b"\x01"), runs(3, 4, [1])),
    ),
}


@pytest.mark.parametrize("chunk", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_runs_outside_the_lease_or_out_of_order_break_the_connection(chunk: ChunkSent) -> None:
    session = generation_at(S.RECEIVING)
    commands = session.handle(chunk, 1)
    assert posted(commands) == []
    assert session.outcome is Outcome.FAILED
    assert len(of_type(commands, DropPeer)) == 1


def test_a_run_over_slots_that_are_apart_breaks_the_connection() -> None:
    session = generation_at(S.ANNOUNCED)
    session.handle(pages_ready(), 0)
    chunk = ChunkSent(session="s", chunk=0, groups=(runs(1, 4, [3]), runs(2, 4, [1])))
    assert len(of_type(session.handle(chunk, 1), DropPeer)) == 1


def test_a_handoff_before_the_last_block_breaks_the_connection() -> None:
    session = generation_at(S.RECEIVING)
    commands = session.handle(Handoff(session="s", data=DATA), 1)
    assert session.outcome is Outcome.FAILED
    assert len(of_type(commands, DropPeer)) == 1
    assert HandoffReceived("r", DATA) not in reported(commands)


def test_a_chunk_after_the_handoff_breaks_the_connection() -> None:
    session = generation_at(S.COMPLETING)
    chunk = ChunkSent(session="s", chunk=2, groups=(runs(4, 4, []), runs(4, 4, [])))
    assert len(of_type(session.handle(chunk, 1), DropPeer)) == 1


def test_pages_that_do_not_fit_the_plan_are_the_callers_fault() -> None:
    session = generation_at(S.ANNOUNCED)
    with pytest.raises(ValueError, match="slots up to block 5, got 4"):
        session.handle(PagesReady(5, pages_ready().blocks), 0)
    blocks = pages_ready().blocks
    short = type(blocks)(blocks.lease, blocks.groups[:1])
    with pytest.raises(ValueError, match="slots of 2 layer groups, got 1"):
        session.handle(PagesReady(4, short), 0)
    assert session.state is S.ANNOUNCED


def test_the_end_of_a_post_counts_once() -> None:
    session = generation_at(S.RECEIVING)
    end_posts(session, [0])
    with pytest.raises(ValueError, match="post 0 is not open"):
        end_posts(session, [0])
    with pytest.raises(ValueError, match="post 99 is not open"):
        end_posts(session, [99])
