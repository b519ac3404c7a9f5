"""Reservations and baselines: what is charged is what is released, and failures leave no trace."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.ledger import LedgerError, ReservationLedger, TokenBaselines
from router.placement import Reservation, ReservationKind
from transfer.identity import Incarnation

WORKERS = tuple(Incarnation(instance=f"w{i}", nonce="0") for i in range(3))
REBOOTED = Incarnation(instance="w0", nonce="1")
KINDS: tuple[ReservationKind, ...] = ("prefill", "sequence")


class LedgerMachine(RuleBasedStateMachine):
    """Random reservations and releases against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ReservationLedger()
        self.model: dict[tuple[str, ReservationKind], Reservation] = {}

    @rule(
        leg=st.sampled_from("abcdef"),
        kind=st.sampled_from(KINDS),
        worker=st.sampled_from(WORKERS),
        tokens=st.integers(0, 1000),
    )
    def reserve(self, leg: str, kind: ReservationKind, worker: Incarnation, tokens: int) -> None:
        reservation = Reservation(leg, kind, worker, tokens)
        if (leg, kind) in self.model:
            with pytest.raises(LedgerError):
                self.ledger.reserve(reservation)
        else:
            self.ledger.reserve(reservation)
            self.model[leg, kind] = reservation

    @rule(leg=st.sampled_from("abcdef"), kind=st.sampled_from(KINDS))
    def release(self, leg: str, kind: ReservationKind) -> None:
        if (leg, kind) in self.model:
            assert self.ledger.release(leg, kind) == self.model.pop((leg, kind))
        else:
            with pytest.raises(LedgerError):
                self.ledger.release(leg, kind)

    @precondition(lambda self: not self.model)
    @rule()
    def empty_is_idle(self) -> None:
        for worker in WORKERS:
            load = self.ledger.load(worker)
            assert load.prefill_tokens == load.sequence_tokens == 0

    @invariant()
    def totals_are_sums(self) -> None:
        self.ledger.check()
        assert len(self.ledger) == len(self.model)
        for worker in WORKERS:
            mine = [entry for entry in self.model.values() if entry.worker == worker]
            load = self.ledger.load(worker)
            assert load.prefill_tokens == sum(e.tokens for e in mine if e.kind == "prefill")
            assert load.sequence_tokens == sum(e.tokens for e in mine if e.kind == "sequence")
            assert load.prefills + load.sequences == len(mine)


TestLedger = LedgerMachine.TestCase


def test_a_failed_first_request_leaves_no_baseline() -> None:
    baselines = TokenBaselines(10)
    version = baselines.begin("c", WORKERS[0], 30_000)
    baselines.fail("c", version)
    assert baselines.tokens("c", WORKERS[0]) is None
    assert len(baselines) == 0


def test_a_late_failure_does_not_undo_a_newer_request() -> None:
    baselines = TokenBaselines(10)
    older = baselines.begin("c", WORKERS[0], 100)
    newer = baselines.begin("c", WORKERS[0], 200)
    baselines.succeed("c", newer)
    baselines.fail("c", older)
    assert baselines.tokens("c", WORKERS[0]) == 200


def test_a_newer_failure_falls_back_to_what_did_not_fail() -> None:
    baselines = TokenBaselines(10)
    first = baselines.begin("c", WORKERS[0], 100)
    baselines.succeed("c", first)
    second = baselines.begin("c", WORKERS[0], 200)
    third = baselines.begin("c", WORKERS[0], 300)
    baselines.fail("c", second)
    assert baselines.tokens("c", WORKERS[0]) == 300
    baselines.fail("c", third)
    assert baselines.tokens("c", WORKERS[0]) == 100


def test_a_late_success_does_not_overwrite_a_newer_one() -> None:
    baselines = TokenBaselines(10)
    older = baselines.begin("c", WORKERS[0], 100)
    newer = baselines.begin("c", WORKERS[0], 200)
    baselines.succeed("c", newer)
    baselines.succeed("c", older)
    assert baselines.tokens("c", WORKERS[0]) == 200


def test_nothing_survives_an_incarnation_and_the_oldest_conversations_go() -> None:
    baselines = TokenBaselines(2)
    for name in "abc":
        baselines.succeed(name, baselines.begin(name, WORKERS[0], 100))
    assert baselines.tokens("a", WORKERS[0]) is None
    assert baselines.tokens("c", WORKERS[0]) == 100
    assert baselines.tokens("c", REBOOTED) is None
