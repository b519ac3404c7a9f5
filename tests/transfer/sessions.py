"""Short hands for tests of one session: make it, feed it, look at what it wants done."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tests.transfer.small_plans import PLAN, FakeLease
from transfer.agent_events import AgentEvent
from transfer.context_session import ContextSession
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.generation_session import GenerationSession
from transfer.identity import Incarnation
from transfer.lease import LeasedBlocks
from transfer.messages import (
    Announce,
    ChoiceHandoff,
    ChunkSent,
    Grant,
    GroupRuns,
    GroupSlots,
    Handoff,
    HandoffData,
    ReceiveReady,
    SessionMessage,
)
from transfer.outcome import PostStatus
from transfer.plan import TransferPlan
from transfer.session import Session, SessionState
from transfer.session_commands import Command, PostReceives, PostSends, Report, SendControl
from transfer.session_events import (
    AnnounceRequested,
    GrantRequested,
    HandOffRequested,
    NoDecodeRequested,
    PagesReady,
    PostEnded,
    ShipRequested,
)
from transfer.wire import pack_ints

LIMITS = TransferLimits(floor_ms=100, least_bytes_per_ms=10, drain_ms=50)
COSTS = TransferCosts(message_us=0)
"""Messages cost nothing: only what cannot move whole is staged."""
PEER = Incarnation(instance="peer", nonce="0")
DATA = HandoffData(choices=(ChoiceHandoff(token=7),), cached_tokens=0)
TAG = 77
CommandT = TypeVar("CommandT")


def lease_of(slots: tuple[list[int], list[int]], first_block: int = 0) -> LeasedBlocks:
    """A lease with these slots in the two layer groups of the plan."""
    tables = tuple(np.array([-1] * first_block + group, dtype=np.int32) for group in slots)
    lease = FakeLease(tables, first_block, first_block + len(slots[0]))
    return lease.blocks((first_block, first_block))


def generation(plan: TransferPlan = PLAN) -> GenerationSession:
    """A new receiving session."""
    return GenerationSession(
        request_id="r", session="s", peer=PEER, plan=plan, limits=LIMITS, tag=TAG
    )


def context(plan: TransferPlan = PLAN, costs: TransferCosts = COSTS) -> ContextSession:
    """A new sending session."""
    return ContextSession(
        request_id="r", session="s", peer=PEER, plan=plan, limits=LIMITS, costs=costs
    )


GRANT = Grant(request_id="r", session="s", prompt_tokens=30, deadline_ms=1_000)
READY = ReceiveReady(
    session="s",
    tag=TAG,
    end_block=4,
    groups=(
        GroupSlots(first_block=1, slots=pack_ints([5, 6, 9])),
        GroupSlots(first_block=2, slots=pack_ints([-1, 3])),
    ),
)
CHUNK = ChunkSent(
    session="s",
    chunk=0,
    groups=(
        GroupRuns(first_block=1, end_block=3, run_blocks=pack_ints([2])),
        GroupRuns(first_block=2, end_block=3, run_blocks=b""),
    ),
)
LAST_CHUNK = ChunkSent(
    session="s",
    chunk=1,
    groups=(
        GroupRuns(first_block=3, end_block=4, run_blocks=pack_ints([1])),
        GroupRuns(first_block=3, end_block=4, run_blocks=pack_ints([1])),
    ),
)


def pages_ready() -> PagesReady:
    """Pages as READY tells them."""
    tables = [-1, 5, 6, 9], [-1, -1, -1, 3]
    lease = FakeLease(tuple(np.array(table, dtype=np.int32) for table in tables), 1, 4)
    return PagesReady(4, lease.blocks((1, 2)))


def ship(first_block: int, end_block: int) -> ShipRequested:
    """Blocks ``[first_block, end_block)``, block b in slot 10 + b of both groups."""
    slots = list(range(10 + first_block, 10 + end_block))
    return ShipRequested(first_block, end_block, lease_of((slots, slots), first_block))


def generation_at(state: SessionState) -> GenerationSession:
    """A receiving session in this state; CLOSING, DOUBT and later hold an open receive."""
    session = generation()
    steps: list[object] = [
        GrantRequested(30, 1_000),
        Announce(session="s"),
        pages_ready(),
        CHUNK,
        LAST_CHUNK,
        Handoff(session="s", data=DATA),
    ]
    count = {
        SessionState.NEW: 0,
        SessionState.GRANTED: 1,
        SessionState.ANNOUNCED: 2,
        SessionState.RECEIVING: 4,
        SessionState.COMPLETING: 6,
    }[state]
    for step in steps[:count]:
        session.handle(step, 0)
    assert session.state is state
    return session


def context_at(state: SessionState) -> ContextSession:
    """A sending session in this state."""
    session = context()
    steps: dict[SessionState, list[object]] = {
        SessionState.NEW: [],
        SessionState.GRANTED: [GRANT],
        SessionState.ANNOUNCED: [GRANT, AnnounceRequested()],
        SessionState.COMPUTED: [
            GRANT,
            AnnounceRequested(),
            ship(0, 4),
            HandOffRequested(DATA),
        ],
        SessionState.SHIPPING: [GRANT, AnnounceRequested(), READY, ship(0, 3)],
        SessionState.HANDED_OFF: [
            GRANT,
            AnnounceRequested(),
            READY,
            ship(0, 4),
            HandOffRequested(DATA),
        ],
        SessionState.CLOSING: [
            GRANT,
            AnnounceRequested(),
            READY,
            ship(0, 4),
            NoDecodeRequested(),
        ],
    }
    for step in steps[state]:
        session.handle(step, 0)
    assert session.state is state
    return session


def sent(commands: tuple[Command, ...]) -> list[SessionMessage]:
    """Messages told to the peer."""
    return [command.message for command in commands if isinstance(command, SendControl)]


def reported(commands: tuple[Command, ...]) -> list[AgentEvent]:
    """Events told to the engine."""
    return [command.event for command in commands if isinstance(command, Report)]


def posted(commands: tuple[Command, ...]) -> list[int]:
    """Ids of the posts made."""
    return [
        post.id
        for command in commands
        if isinstance(command, PostSends | PostReceives)
        for post in command.posts
    ]


def of_type(commands: tuple[Command, ...], kind: type[CommandT]) -> list[CommandT]:
    """Commands of one type."""
    return [command for command in commands if isinstance(command, kind)]


def end_posts(
    session: Session, posts: list[int], status: PostStatus = PostStatus.DONE, now_ms: int = 0
) -> tuple[Command, ...]:
    """End these posts; all commands that follow."""
    commands: tuple[Command, ...] = ()
    for post in posts:
        commands += session.handle(PostEnded(post, status), now_ms)
    return commands
