"""The sending session, event by event."""

from __future__ import annotations

import pytest

from tests.transfer.sessions import (
    CHUNK,
    DATA,
    GRANT,
    LAST_CHUNK,
    PEER,
    READY,
    TAG,
    context,
    context_at,
    end_posts,
    lease_of,
    of_type,
    posted,
    reported,
    sent,
    ship,
)
from transfer.agent_events import GrantReceived, LeaseEnded, LeaseInDoubt, SessionEnded
from transfer.messages import (
    Announce,
    CancelSession,
    ChunkSent,
    GroupRuns,
    GroupSlots,
    Handoff,
    NoDecode,
    Received,
    ReceiveReady,
    SenderFailed,
)
from transfer.outcome import Access, Outcome, PeerFate, PostStatus
from transfer.region import Post, Region
from transfer.session import SessionState
from transfer.session_commands import ArmDeadline, DropPeer, PostSends, SendControl
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    HandOffRequested,
    NoDecodeRequested,
    PeerDied,
    PeerLost,
    PostEnded,
    ShipRequested,
)
from transfer.wire import pack_ints

S = SessionState
OPEN = [S.GRANTED, S.ANNOUNCED, S.COMPUTED, S.SHIPPING, S.HANDED_OFF]


def test_from_grant_to_received() -> None:
    session = context()
    commands = session.handle(GRANT, 5)
    assert reported(commands) == [GrantReceived("r", PEER)]
    assert of_type(commands, ArmDeadline) == [ArmDeadline(1_005)]
    assert sent(session.handle(AnnounceRequested(), 6)) == [Announce(session="s")]
    assert session.handle(READY, 7) == ()

    first = ship(0, 3)
    commands = session.handle(first, 8)
    # The receiver has block 0, wants blocks 1 and 2 (slots 5 and 6) in group 0, none in group 1.
    assert commands[:2] == (
        PostSends(TAG, (Post(0, Region(0, 0, 11, 2), 128), Post(1, Region(0, 1, 11, 2), 32))),
        SendControl(CHUNK),
    )
    last = ship(3, 4)
    commands = session.handle(last, 9)
    assert sent(commands) == [LAST_CHUNK]
    assert sent(session.handle(HandOffRequested(DATA), 10)) == [Handoff(session="s", data=DATA)]
    assert reported(end_posts(session, [0, 1])) == [LeaseEnded("r", first.blocks.lease)]
    assert reported(session.handle(Received(session="s"), 11)) == [
        SessionEnded("r", Outcome.SUCCEEDED, "received", 272, 3)
    ]
    assert session.state is S.CLOSING
    assert reported(end_posts(session, [2, 3, 4])) == [LeaseEnded("r", last.blocks.lease)]
    assert session.closed


def test_chunks_wait_for_the_receivers_pages() -> None:
    session = context_at(S.ANNOUNCED)
    for chunk in (ship(0, 3), ship(3, 4)):
        assert session.handle(chunk, 1) == ()
    assert session.handle(HandOffRequested(DATA), 2) == ()
    assert (session.state, session.access) == (S.COMPUTED, Access.NOT_SUBMITTED)
    commands = session.handle(READY, 3)
    assert [type(command) for command in commands[:5]] == [
        PostSends,
        SendControl,
        PostSends,
        SendControl,
        SendControl,
    ]
    assert sent(commands) == [CHUNK, LAST_CHUNK, Handoff(session="s", data=DATA)]
    assert session.state is S.HANDED_OFF


def test_blocks_that_the_receiver_has_are_skipped_and_their_lease_ends() -> None:
    session = context_at(S.ANNOUNCED)
    session.handle(READY, 0)
    skipped = ship(0, 1)
    commands = session.handle(skipped, 1)
    assert sent(commands) == []
    assert reported(commands) == [LeaseEnded("r", skipped.blocks.lease)]


def test_nothing_wanted_is_a_handoff_without_chunks() -> None:
    session = context_at(S.ANNOUNCED)
    nothing = GroupSlots(first_block=4, slots=b"")
    session.handle(ReceiveReady(session="s", tag=1, end_block=4, groups=(nothing, nothing)), 0)
    assert posted(session.handle(ship(0, 4), 1)) == []
    assert sent(session.handle(HandOffRequested(DATA), 2)) == [Handoff(session="s", data=DATA)]
    assert [
        event.outcome
        for event in reported(session.handle(Received(session="s"), 3))
        if isinstance(event, SessionEnded)
    ] == [Outcome.SUCCEEDED]
    assert session.closed


@pytest.mark.parametrize("state", OPEN)
def test_no_decode_at_any_time(state: SessionState) -> None:
    session = context_at(state)
    commands = session.handle(NoDecodeRequested(), 1)
    assert sent(commands) == [NoDecode(session="s")]
    assert session.outcome is Outcome.SUCCEEDED
    assert session.closed is (state in (S.GRANTED, S.ANNOUNCED, S.COMPUTED))


@pytest.mark.parametrize("state", OPEN)
def test_a_cancellation_from_here_is_told_and_final(state: SessionState) -> None:
    session = context_at(state)
    commands = session.handle(CancelRequested("client left"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="client left")]
    assert session.outcome is Outcome.CANCELLED
    assert session.handle(CancelRequested("again"), 2) == ()
    assert session.handle(CancelSession(session="s", reason="client left"), 3) == ()


@pytest.mark.parametrize("state", OPEN)
def test_a_cancellation_from_the_receiver_is_answered(state: SessionState) -> None:
    """The receiver keeps its pages until this answer: nothing is posted after it."""
    session = context_at(state)
    commands = session.handle(CancelSession(session="s", reason="client left"), 1)
    assert sent(commands) == [CancelSession(session="s", reason="client left")]
    assert session.outcome is Outcome.CANCELLED
    late = ship(3, 4)
    commands = session.handle(late, 2)
    assert posted(commands) == []
    assert reported(commands) == [LeaseEnded("r", late.blocks.lease)]
    for event in (AnnounceRequested(), HandOffRequested(DATA), NoDecodeRequested(), READY):
        assert session.handle(event, 3) == ()


@pytest.mark.parametrize("state", OPEN)
def test_failure_here_is_told(state: SessionState) -> None:
    session = context_at(state)
    commands = session.handle(FailureReported("out of memory"), 1)
    assert sent(commands) == [SenderFailed(session="s", reason="out of memory")]
    assert session.outcome is Outcome.FAILED


def test_leases_outlive_the_outcome_until_their_sends_have_ended() -> None:
    session = context_at(S.SHIPPING)
    assert [type(event) for event in reported(session.handle(CancelRequested("x"), 1))] == [
        SessionEnded
    ]
    assert (session.state, session.access) == (S.CLOSING, Access.IN_FLIGHT)
    assert reported(end_posts(session, [0])) == []
    events = reported(end_posts(session, [1], PostStatus.REVOKED))
    assert [type(event) for event in events] == [LeaseEnded]
    assert session.closed


def test_waiting_chunks_give_their_leases_back_when_the_session_ends() -> None:
    session = context_at(S.COMPUTED)
    events = reported(session.handle(CancelSession(session="s", reason="x"), 1))
    assert [type(event) for event in events] == [SessionEnded, LeaseEnded]
    assert session.closed


@pytest.mark.parametrize("status", [PostStatus.REVOKED, PostStatus.LOST])
def test_a_send_that_fails_is_told_and_breaks_the_connection(status: PostStatus) -> None:
    session = context_at(S.SHIPPING)
    commands = session.handle(PostEnded(0, status), 1)
    assert [type(message) for message in sent(commands)] == [SenderFailed]
    assert len(of_type(commands, DropPeer)) == 1
    assert session.outcome is Outcome.FAILED


def test_a_dead_peer_ends_everything_at_once() -> None:
    session = context_at(S.HANDED_OFF)
    events = reported(session.handle(PeerLost("reset", PeerFate.DEAD), 1))
    assert [type(event) for event in events] == [SessionEnded, LeaseEnded]
    assert session.closed


def test_a_lost_peer_may_still_read_so_its_pages_are_in_doubt() -> None:
    session = context_at(S.SHIPPING)
    session.handle(PeerLost("silent", PeerFate.UNKNOWN), 1)
    events = reported(end_posts(session, [0, 1], PostStatus.LOST))
    assert [type(event) for event in events] == [LeaseInDoubt]
    assert session.state is S.DOUBT
    assert [type(event) for event in reported(session.handle(PeerDied(), 2))] == [LeaseEnded]
    assert session.closed


def test_nothing_is_said_on_a_lost_connection() -> None:
    session = context_at(S.SHIPPING)
    assert sent(session.handle(PeerLost("silent", PeerFate.UNKNOWN), 1)) == []
    assert sent(session.handle(CancelRequested("x"), 2)) == []


def test_a_grant_that_nobody_takes_up_ends_at_its_deadline() -> None:
    session = context_at(S.GRANTED)
    commands = session.handle(DeadlinePassed(), 1_000)
    assert session.outcome is Outcome.FAILED
    assert [type(message) for message in sent(commands)] == [SenderFailed]
    assert session.closed


def test_silence_after_the_handoff_ends_before_the_request_does() -> None:
    session = context_at(S.HANDED_OFF)
    end_posts(session, [0, 1, 2, 3, 4], now_ms=50)
    assert reported(session.handle(DeadlinePassed(), 149)) == []
    session.handle(DeadlinePassed(), 150)
    assert session.outcome is Outcome.FAILED


def test_a_stalled_send_ends_before_the_request_does() -> None:
    session = context_at(S.SHIPPING)
    commands = session.handle(DeadlinePassed(), 116)
    assert [type(message) for message in sent(commands)] == [SenderFailed]
    commands = session.handle(DeadlinePassed(), 116 + 66)
    assert len(of_type(commands, DropPeer)) == 1
    assert session.access is Access.IN_FLIGHT


def test_repeated_messages_change_nothing() -> None:
    session = context_at(S.HANDED_OFF)
    assert session.handle(GRANT, 1) == ()
    assert session.handle(READY, 1) == ()
    assert session.state is S.HANDED_OFF


def test_a_page_that_is_gone_fails_the_transfer_and_is_told() -> None:
    session = context_at(S.ANNOUNCED)
    session.handle(READY, 0)
    blocks = lease_of(([10, -1, 12, 13], [10, 11, 12, 13]))
    commands = session.handle(ShipRequested(0, 4, blocks), 1)
    assert posted(commands) == []
    (message,) = sent(commands)
    assert isinstance(message, SenderFailed)
    assert "wants block 1, whose page is gone" in message.reason
    assert LeaseEnded("r", blocks.lease) in reported(commands)


def test_a_stale_page_that_nobody_wants_is_fine() -> None:
    session = context_at(S.ANNOUNCED)
    session.handle(READY, 0)
    blocks = lease_of(([-1, 11, 12, 13], [-1, -1, -1, 13]))
    assert len(posted(session.handle(ShipRequested(0, 4, blocks), 1))) == 5


def test_a_handoff_before_the_last_block_fails_and_is_told() -> None:
    session = context_at(S.SHIPPING)
    commands = session.handle(HandOffRequested(DATA), 1)
    (message,) = sent(commands)
    assert isinstance(message, SenderFailed)
    assert session.outcome is Outcome.FAILED


def test_runs_break_where_either_end_does() -> None:
    session = context_at(S.ANNOUNCED)
    session.handle(
        ReceiveReady(
            session="s",
            tag=1,
            end_block=4,
            groups=(
                GroupSlots(first_block=0, slots=pack_ints([0, 1, 2, 7])),
                GroupSlots(first_block=4, slots=b""),
            ),
        ),
        0,
    )
    blocks = lease_of(([5, 6, 8, 9], [0, 0, 0, 0]))
    (message,) = sent(session.handle(ShipRequested(0, 4, blocks), 1))
    assert isinstance(message, ChunkSent)
    assert message.groups[0] == GroupRuns(
        first_block=0, end_block=4, run_blocks=pack_ints([2, 1, 1])
    )


BAD_READY = {
    "another group count": READY.model_copy(update={"groups": READY.groups[:1]}),
    "another end": READY.model_copy(update={"end_block": 5}),
    "slot below -1": READY.model_copy(
        update={
            "groups": (
                GroupSlots(first_block=1, slots=pack_ints([5, 6, -2])),
                READY.groups[1],
            )
        }
    ),
    "ragged slots": READY.model_copy(
        update={"groups": (GroupSlots(first_block=1, slots=b"\x01"), READY.groups[1])}
    ),
}


@pytest.mark.parametrize("ready", BAD_READY.values(), ids=BAD_READY)
def test_pages_that_do_not_fit_the_plan_break_the_connection(ready: ReceiveReady) -> None:
    session = context_at(S.ANNOUNCED)
    commands = session.handle(ready, 1)
    assert session.outcome is Outcome.FAILED
    assert len(of_type(commands, DropPeer)) == 1


def test_blocks_out_of_order_are_the_callers_fault() -> None:
    session = context_at(S.SHIPPING)
    with pytest.raises(ValueError, match=r"blocks from 3 on, got \[2, 4\)"):
        session.handle(ship(2, 4), 1)
    blocks = ship(3, 4).blocks
    short = ShipRequested(3, 4, type(blocks)(blocks.lease, blocks.groups[:1]))
    with pytest.raises(ValueError, match="2 layer groups, got 1"):
        session.handle(short, 1)
    assert session.outcome is Outcome.PENDING
