"""The only place where load changes: reservations by id, and what each conversation was last
charged for.

Invariant: the totals of a worker are the sums over its open reservations
(:meth:`ReservationLedger.check` recomputes them), so a release takes off exactly what was charged.
All amounts are tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.placement import Reservation, ReservationKind
from transfer.identity import Incarnation


class LedgerError(RuntimeError):
    """A reservation was made twice, or released without having been made: a bug in the caller."""


@dataclass(frozen=True)
class WorkerLoad:
    """Open reservations of one worker."""

    prefill_tokens: int = 0
    """Backlog: prompt tokens accepted, not yet prefilled, that no cache covers."""
    prefills: int = 0
    sequence_tokens: int = 0
    sequences: int = 0


IDLE = WorkerLoad()


class ReservationLedger:
    """Open reservations and their totals by worker."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, ReservationKind], Reservation] = {}
        self._loads: dict[Incarnation, WorkerLoad] = {}

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, reservation: Reservation) -> None:
        """Charge a worker. Raises LedgerError when the id is already open."""
        key = (reservation.leg_id, reservation.kind)
        if key in self._open:
            raise LedgerError(f"reservation {key} is already open; release it first")
        if reservation.tokens < 0:
            raise LedgerError(f"reservation {key} of {reservation.tokens} tokens; expected >= 0")
        self._open[key] = reservation
        self._loads[reservation.worker] = _charged(self.load(reservation.worker), reservation, 1)

    def release(self, leg_id: str, kind: ReservationKind) -> Reservation:
        """Take back exactly what was charged. Raises LedgerError when nothing is open under this
        id.
        """
        reservation = self._open.pop((leg_id, kind), None)
        if reservation is None:
            raise LedgerError(
                f"no open {kind} reservation of leg {leg_id!r}: released twice or never made"
            )
        load = _charged(self.load(reservation.worker), reservation, -1)
        if load == IDLE:
            del self._loads[reservation.worker]
        else:
            self._loads[reservation.worker] = load
        return reservation

    def load(self, worker: Incarnation) -> WorkerLoad:
        """Totals of one worker; zero for one that is unknown."""
        return self._loads.get(worker, IDLE)

    def open_on(self, worker: Incarnation) -> tuple[Reservation, ...]:
        """Open reservations of one worker, for diagnosis."""
        return tuple(entry for entry in self._open.values() if entry.worker == worker)

    def check(self) -> None:
        """Recompute every total. Raises LedgerError when one differs."""
        expected: dict[Incarnation, WorkerLoad] = {}
        for entry in self._open.values():
            expected[entry.worker] = _charged(expected.get(entry.worker, IDLE), entry, 1)
        if expected != self._loads:
            raise LedgerError(f"ledger totals: expected {expected}, got {self._loads}")


def _charged(load: WorkerLoad, reservation: Reservation, sign: int) -> WorkerLoad:
    if reservation.kind == "prefill":
        return WorkerLoad(
            load.prefill_tokens + sign * reservation.tokens,
            load.prefills + sign,
            load.sequence_tokens,
            load.sequences,
        )
    return WorkerLoad(
        load.prefill_tokens,
        load.prefills,
        load.sequence_tokens + sign * reservation.tokens,
        load.sequences + sign,
    )


@dataclass(frozen=True)
class _Baseline:
    version: int
    worker: Incarnation
    tokens: int


@dataclass
class _Conversation:
    confirmed: _Baseline | None = None
    pending: dict[int, _Baseline] = field(default_factory=dict)

    def newest(self) -> Iterator[_Baseline]:
        yield from sorted(self.pending.values(), key=lambda entry: -entry.version)
        if self.confirmed is not None:
            yield self.confirmed


class TokenBaselines:
    """Prompt length up to which each conversation was charged, versioned by request.

    A request in flight counts as charged; when it fails its own entry goes and nothing else
    changes, so neither does a failed first request make its retry look like growth, nor can a late
    failure undo a newer request's entry.
    """

    def __init__(self, max_conversations: int) -> None:
        self._max_conversations = max_conversations
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._version = 0

    def __len__(self) -> int:
        return len(self._conversations)

    def tokens(self, conversation_id: str, worker: Incarnation) -> int | None:
        """Tokens already charged on this incarnation; None when the conversation is new to it."""
        conversation = self._conversations.get(conversation_id)
        if conversation is None:
            return None
        return next((b.tokens for b in conversation.newest() if b.worker == worker), None)

    def begin(self, conversation_id: str, worker: Incarnation, tokens: int) -> int:
        """Note a request in flight; the returned version settles it."""
        self._version += 1
        conversation = self._conversations.setdefault(conversation_id, _Conversation())
        conversation.pending[self._version] = _Baseline(self._version, worker, tokens)
        self._conversations.move_to_end(conversation_id)
        self._evict()
        return self._version

    def succeed(self, conversation_id: str, version: int) -> None:
        """The request's prompt was prefilled. Does not overwrite a newer success."""
        conversation = self._conversations.get(conversation_id)
        baseline = None if conversation is None else conversation.pending.pop(version, None)
        if conversation is None or baseline is None:
            return
        if conversation.confirmed is None or conversation.confirmed.version < version:
            conversation.confirmed = baseline

    def fail(self, conversation_id: str, version: int) -> None:
        """The request failed before its prompt was prefilled: it charged nothing that lasts."""
        conversation = self._conversations.get(conversation_id)
        if conversation is None:
            return
        conversation.pending.pop(version, None)
        if not conversation.pending and conversation.confirmed is None:
            del self._conversations[conversation_id]

    def _evict(self) -> None:
        while len(self._conversations) > self._max_conversations:
            self._conversations.popitem(last=False)
