"""What a rank that is a dp group tells of its transfers: all of it, as nobody else has a part."""

from __future__ import annotations

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
from transfer.wire import pack_ints
from worker.agreement import fact_of
from worker.rank_facts import GroupFact, RankAsked, RankFound, RankGranted, RankHandedOff


def group_fact_of(event: AgentEvent, lease: int) -> GroupFact | None:
    """An agent's event with all that it says; ``lease`` is the name of its lease. None for what
    nobody waits for.
    """
    match event:
        case GrantReceived():
            return RankGranted(request_id=event.request_id, generation=event.generation)
        case PullReceived():
            return RankAsked(
                request_id=event.request_id,
                puller=event.puller,
                scope=event.prefix.scope,
                tokens=pack_ints(event.prefix.tokens),
                least_blocks=event.least_blocks,
            )
        case PrefixFoundReceived():
            return RankFound(request_id=event.request_id, end_block=event.end_block)
        case HandoffReceived():
            return RankHandedOff(request_id=event.request_id, data=event.data)
        case (
            AnnounceReceived()
            | NoDecodeReceived()
            | ChunkReceived()
            | SessionEnded()
            | LeaseEnded()
            | LeaseInDoubt()
        ):
            return fact_of(event, lease)
