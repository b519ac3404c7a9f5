"""Memories of a shell are exact while they last, and bounded."""

from __future__ import annotations

from transfer.pending import EndedSessions, PendingCancels


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
