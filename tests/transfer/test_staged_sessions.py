"""What sessions stage, how both ends cut it alike, and what a receiver does not believe."""

from __future__ import annotations

import pytest

from tests.transfer.sessions import (
    DATA,
    GRANT,
    READY,
    TAG,
    context,
    end_posts,
    generation,
    of_type,
    pages_ready,
    posted,
    reported,
    sent,
    ship,
)
from tests.transfer.small_plans import DEAR_MESSAGES, MIXED_PLAN, PLAN, STAGING_PLAN
from transfer.agent_events import LeaseEnded, SessionEnded
from transfer.context_session import ContextSession
from transfer.costs import TransferCosts
from transfer.generation_session import GenerationSession
from transfer.messages import Announce, ChunkSent, GroupRuns, Handoff, Received
from transfer.outcome import Outcome
from transfer.plan import TransferPlan
from transfer.region import Region, Staged
from transfer.session_commands import DropPeer, PostReceives, PostSends
from transfer.session_events import (
    AnnounceRequested,
    GrantRequested,
    HandOffRequested,
)
from transfer.wire import pack_ints


def runs(first: int, end: int, lengths: list[int]) -> GroupRuns:
    return GroupRuns(first_block=first, end_block=end, run_blocks=pack_ints(lengths))


def stages(first: int, end: int, lengths: list[int]) -> GroupRuns:
    return runs(first, end, lengths).model_copy(update={"staged": True})


def chunk(*groups: GroupRuns) -> ChunkSent:
    return ChunkSent(session="s", chunk=0, groups=groups)


def shipping(plan: TransferPlan, costs: TransferCosts) -> ContextSession:
    """A sender that knows where READY wants its pages."""
    session = context(plan, costs)
    for event in (GRANT, AnnounceRequested(), READY):
        session.handle(event, 0)
    return session


def receiving(plan: TransferPlan) -> GenerationSession:
    """A receiver of READY."""
    session = generation(plan)
    for event in (GrantRequested(30, 1_000), Announce(session="s"), pages_ready()):
        session.handle(event, 0)
    return session


def test_groups_whose_layouts_differ_are_staged_whatever_messages_cost() -> None:
    session = shipping(MIXED_PLAN, TransferCosts(message_us=0))
    commands = session.handle(ship(0, 4), 0)
    # Blocks 1 to 3 of group 0 in two messages, of group 1 block 3 whole.
    assert sent(commands) == [chunk(stages(1, 4, [1, 2]), runs(2, 4, [1]))]
    (sends,) = of_type(commands, PostSends)
    *staged, whole = sends.posts
    for post, slots in zip(staged, ([11], [12, 13]), strict=True):
        assert isinstance(post.region, Staged)
        assert (post.region.group, post.region.slots.tolist()) == (0, slots)
        assert post.size_bytes == len(slots) * 80
    assert (whole.region, whole.size_bytes) == (Region(1, 0, 13, 1), 32)


def test_short_runs_are_staged_where_that_pays() -> None:
    commands = shipping(STAGING_PLAN, DEAR_MESSAGES).handle(ship(0, 4), 0)
    # Two runs in two pools become two messages; a single message stays as it is.
    assert sent(commands) == [chunk(stages(1, 4, [1, 2]), runs(2, 4, [1]))]
    commands = shipping(STAGING_PLAN, TransferCosts(message_us=0)).handle(ship(0, 4), 0)
    assert sent(commands) == [chunk(runs(1, 4, [2, 1]), runs(2, 4, [1]))]


def test_nothing_is_staged_between_memories_that_cannot() -> None:
    commands = shipping(PLAN, DEAR_MESSAGES).handle(ship(0, 4), 0)
    assert sent(commands) == [chunk(runs(1, 4, [2, 1]), runs(2, 4, [1]))]


@pytest.mark.parametrize("plan", [MIXED_PLAN, STAGING_PLAN], ids=["mixed", "short runs"])
def test_both_ends_post_the_same_messages_and_count_the_bytes_that_move(
    plan: TransferPlan,
) -> None:
    sender, receiver = shipping(plan, DEAR_MESSAGES), receiving(plan)
    there = sender.handle(ship(0, 4), 0)
    (message,) = sent(there)
    assert isinstance(message, ChunkSent)
    assert message.groups[0] == stages(1, 4, [1, 2])
    here = receiver.handle(message, 0)
    (sends,), (receives,) = of_type(there, PostSends), of_type(here, PostReceives)
    assert [post.size_bytes for post in sends.posts] == [80, 160, 32]
    assert [post.size_bytes for post in receives.posts] == [80, 160, 32]
    assert receives.tag == sends.tag == TAG
    pieces = [post.region for post in receives.posts]
    slots = [piece.slots.tolist() for piece in pieces if isinstance(piece, Staged)]
    assert slots == [[5], [6, 9]]
    sender.handle(HandOffRequested(DATA), 1)
    receiver.handle(Handoff(session="s", data=DATA), 1)
    end_posts(sender, posted(there))
    events = reported(end_posts(receiver, posted(here)))
    ends = [event for event in events if isinstance(event, SessionEnded)]
    assert [(e.outcome, e.transferred_bytes) for e in ends] == [(Outcome.SUCCEEDED, 272)]
    assert isinstance(events[-1], LeaseEnded)
    events = reported(sender.handle(Received(session="s"), 2))
    assert [e.transferred_bytes for e in events if isinstance(e, SessionEnded)] == [272]
    assert sender.closed
    assert receiver.closed


LAST = runs(2, 4, [1])
UNBELIEVABLE = {
    "whole slots where layouts differ": (MIXED_PLAN, runs(1, 4, [2, 1])),
    "staged where nothing can": (PLAN, stages(1, 4, [3])),
    "more than a buffer takes": (MIXED_PLAN, stages(1, 4, [3])),
    "too few blocks": (MIXED_PLAN, stages(1, 4, [2])),
    "too many blocks": (MIXED_PLAN, stages(1, 4, [2, 2])),
    "an empty message": (MIXED_PLAN, stages(1, 4, [2, 0, 1])),
    "negative": (STAGING_PLAN, stages(1, 4, [2, 2, -1])),
    "blocks past the end": (MIXED_PLAN, stages(1, 5, [2, 2])),
    "ragged": (
        MIXED_PLAN,
        GroupRuns(first_block=1, end_block=4, run_blocks=b"\x01", staged=True),
    ),
}


@pytest.mark.parametrize(("plan", "told"), UNBELIEVABLE.values(), ids=UNBELIEVABLE)
def test_a_cut_that_does_not_fit_breaks_the_connection(plan: TransferPlan, told: GroupRuns) -> None:
    session = receiving(plan)
    commands = session.handle(chunk(told, LAST), 1)
    assert posted(commands) == []
    assert session.outcome is Outcome.FAILED
    assert len(of_type(commands, DropPeer)) == 1
