"""Memories of a shell are exact while they last, and bounded."""

from __future__ import annotations

from transfer.identity import Incarnation, RankId
from transfer.outcome import Outcome
from transfer.pending import EndedSessions, PendingCancels, Unfinished, UnfinishedGrants

GENERATION = Incarnation(instance="g", nonce="1")


def test_a_cancellation_is_remembered_once_with_its_first_reason() -> None:
    cancels = PendingCancels()
    cancels.remember("r", "first")
    cancels.remember("r", "second")
    assert cancels.take("r") == "first"
    assert cancels.take("r") is None


def test_a_cancellation_after_the_end_was_not_for_the_next_of_that_name() -> None:
    cancels = PendingCancels()
    assert cancels.take("r") is None
    cancels.over("r")
    cancels.remember("r", "late")
    assert cancels.take("r") is None
    cancels.remember("r", "early")
    assert cancels.take("r") == "early"


def test_both_forget_the_oldest() -> None:
    cancels = PendingCancels(capacity=2)
    ended = EndedSessions(capacity=2)
    for name in ("a", "b", "c"):
        cancels.remember(name, name)
        ended.add(name)
    assert [cancels.take(name) for name in ("a", "b", "c")] == [None, "b", "c"]
    assert [name in ended for name in ("a", "b", "c")] == [False, True, True]


def unfinished(missing: int) -> Unfinished:
    return Unfinished(GENERATION, frozenset({0}), missing, Outcome.FAILED, "deadline")


def test_every_missing_grant_is_told_once_how_the_request_ended() -> None:
    grants = UnfinishedGrants()
    grants.remember("r", unfinished(2))
    for rank in (2, 1):
        end = grants.take("r", RankId(GENERATION, rank))
        assert end is not None
        assert (end.outcome, end.reason) == (Outcome.FAILED, "deadline")
    assert grants.take("r", RankId(GENERATION, 3)) is None


def test_a_rank_that_grants_again_or_another_instance_means_a_new_request() -> None:
    grants = UnfinishedGrants(capacity=1)
    again = RankId(GENERATION, 0)
    other = RankId(Incarnation(instance="g", nonce="2"), 1)
    for peer in (again, other):
        grants.remember("r", unfinished(1))
        assert grants.take("r", peer) is None
        assert grants.take("r", RankId(GENERATION, 1)) is None
    grants.remember("r", unfinished(2))
    assert grants.take("r", RankId(GENERATION, 1)) is not None
    assert grants.take("r", RankId(GENERATION, 1)) is None
    grants.remember("pushed out", unfinished(1))
    grants.remember("r", unfinished(1))
    assert grants.take("pushed out", RankId(GENERATION, 1)) is None
