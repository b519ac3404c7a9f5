"""What an instance of three ranks agrees on, fact by fact."""

from __future__ import annotations

from typing import Any

import pytest

from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.identity import Incarnation
from transfer.outcome import Outcome
from worker.agreement import EndEverywhere, TransferAgreement, fact_of
from worker.rank_facts import RankFact

R = "request"
GRANT = GrantReceived(R, Incarnation(instance="generation", nonce="1"))
HANDOFF = HandoffReceived(R, None)
LEASE: Any = object()
LEASE_NAME = 7


def ended(outcome: Outcome, reason: str = "", moved: int = 0) -> SessionEnded:
    return SessionEnded(R, outcome, reason, moved, moved)


WELL = ended(Outcome.SUCCEEDED)
BADLY = ended(Outcome.FAILED, "the peer is gone")
CANCELLED = ended(Outcome.CANCELLED, "nobody wants it")


class Ranks:
    """Three ranks whose agents say things."""

    def __init__(self) -> None:
        self.agreement = TransferAgreement(3)

    def say(self, rank: int, *events: AgentEvent) -> list[AgentEvent | EndEverywhere]:
        found: list[AgentEvent | EndEverywhere] = []
        for event in events:
            fact = fact_of(event, LEASE_NAME)
            assert fact is not None
            found += self.agreement.heard(rank, fact, event if rank == 0 else None)
        return found


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def begun(ranks: Ranks) -> Ranks:
    ranks.agreement.begun(R)
    return ranks


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_grant_counts_when_every_rank_has_it(ranks: Ranks, order: tuple[int, ...]) -> None:
    *first, last = order
    assert [ranks.say(rank, GRANT) for rank in first] == [[], []]
    assert ranks.say(last, GRANT) == [GRANT]


def test_a_rank_that_nobody_has_pages_for_succeeds_without_a_word(begun: Ranks) -> None:
    announced = AnnounceReceived(R)
    assert begun.say(2, WELL) == []
    assert begun.say(0, announced) == []
    assert begun.say(1, announced) == [announced]
    assert begun.say(0, HANDOFF, ended(Outcome.SUCCEEDED, moved=3)) == []
    assert begun.say(1, HANDOFF, ended(Outcome.SUCCEEDED, moved=4)) == [
        HANDOFF,
        SessionEnded(R, Outcome.SUCCEEDED, "", 7, 4),
    ]


def test_words_keep_their_order(begun: Ranks) -> None:
    announced = AnnounceReceived(R)
    assert begun.say(0, announced, HANDOFF) == []
    assert begun.say(1, announced, HANDOFF) == []
    assert begun.say(2, announced) == [announced]
    assert begun.say(2, HANDOFF) == [HANDOFF]


def test_one_ranks_failure_ends_the_others(begun: Ranks) -> None:
    assert begun.say(0, HANDOFF, WELL) == []
    assert begun.say(1, BADLY) == [EndEverywhere(R, "the peer is gone")]
    assert begun.say(2, CANCELLED) == [BADLY]  # failed wins, and nothing is handed off
    assert begun.say(2, HANDOFF) == []  # too late to matter


def test_what_the_engine_gave_up_is_ended_once_everywhere(begun: Ranks) -> None:
    begun.agreement.given_up(R)
    assert begun.say(1, CANCELLED) == []
    assert begun.say(0, CANCELLED) == []
    assert begun.say(2, WELL) == [CANCELLED]


def test_a_request_that_only_some_ranks_heard_of(ranks: Ranks) -> None:
    """A peer began it and gave up before it had asked all: nobody waits for the others."""
    assert ranks.say(0, GRANT) == []
    assert ranks.say(0, BADLY) == [EndEverywhere(R, "the peer is gone"), BADLY]
    assert ranks.say(2, GRANT, CANCELLED) == []


def test_a_request_that_the_leader_never_heard_of(ranks: Ranks) -> None:
    assert ranks.say(1, GRANT) == []
    assert ranks.say(1, CANCELLED) == [EndEverywhere(R, "nobody wants it")]
    assert ranks.say(0, GRANT, CANCELLED) == []


def test_a_lease_is_over_when_it_is_on_every_rank(ranks: Ranks) -> None:
    ranks.agreement.lent(R, LEASE_NAME, LEASE)
    over, doubtful = LeaseEnded(R, LEASE), LeaseInDoubt(R, LEASE, "lost")
    assert ranks.say(0, over) == []
    assert ranks.say(1, doubtful) == [doubtful]
    assert ranks.say(2, doubtful, over) == []
    assert ranks.say(1, over) == [over]


def test_nobody_waits_for_chunks() -> None:
    fact: RankFact | None = fact_of(ChunkReceived(R, 1), 0)
    assert fact is None
