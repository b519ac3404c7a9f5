"""What all ranks of an instance have come to in their transfers, as the engine is to hear it.

Sans-IO. A request has got somewhere when every rank has, has ended when every rank's part has, and
has failed as soon as one rank's has: then the others are ended too. A lease is over when it is on
every rank, and in doubt when it is on any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

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
from transfer.consensus import TransferFacts, agree
from transfer.lease import TransferLease
from transfer.outcome import Outcome
from worker.rank_facts import (
    RankEnded,
    RankFact,
    RankLeaseEnded,
    RankLeaseInDoubt,
    RankProgress,
    Word,
)

LEADER: Final = 0
REMEMBERED: Final = 4096
"""Requests that are over, whose late words mean nothing."""

WORDS: Final[dict[type, Word]] = {
    GrantReceived: "granted",
    AnnounceReceived: "announced",
    PullReceived: "pull",
    PrefixFoundReceived: "found",
    HandoffReceived: "handed_off",
    NoDecodeReceived: "no_decode",
}
OUTCOMES: Final[dict[Outcome, Literal["succeeded", "failed", "cancelled"]]] = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}
OPENING: Final[frozenset[Word]] = frozenset({"granted", "pull"})
"""The first word about a request that a peer began."""


def fact_of(event: AgentEvent, lease: int) -> RankFact | None:
    """An agent's event as a fact; ``lease`` is the name of its lease. None for what nobody waits
    for.
    """
    match event:
        case SessionEnded():
            return RankEnded(
                request_id=event.request_id,
                outcome=OUTCOMES[event.outcome],
                reason=event.reason,
                transferred_bytes=event.transferred_bytes,
                transferred_blocks=event.transferred_blocks,
            )
        case LeaseEnded():
            return RankLeaseEnded(lease=lease)
        case LeaseInDoubt():
            return RankLeaseInDoubt(lease=lease, reason=event.reason)
        case ChunkReceived():
            return None
        case _:
            return RankProgress(request_id=event.request_id, word=WORDS[type(event)])


@dataclass(frozen=True, slots=True)
class EndEverywhere:
    """One rank's part has ended badly: end the others'."""

    request_id: str
    reason: str


@dataclass(eq=False, slots=True)
class _Request:
    opened: set[int]
    """Ranks that have a part in it."""
    said: dict[Word, set[int]] = field(default_factory=dict)
    waiting: deque[tuple[Word, AgentEvent]] = field(default_factory=deque)
    """The leader's own events that other ranks have not come to."""
    ends: dict[int, RankEnded] = field(default_factory=dict)
    ending: bool = False


@dataclass(eq=False, slots=True)
class _Lease:
    request_id: str
    lease: TransferLease
    holders: set[int]
    in_doubt: bool = False


class TransferAgreement:
    """Facts of ``size`` ranks in, events of the instance out. The leader is rank 0."""

    def __init__(self, size: int) -> None:
        self._ranks = frozenset(range(size))
        self._requests: dict[str, _Request] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED)
        self._leases: dict[int, _Lease] = {}

    def begun(self, request_id: str) -> None:
        """The engine begins a transfer on all ranks."""
        self._requests[request_id] = _Request(set(self._ranks))

    def lent(self, request_id: str, name: int, lease: TransferLease) -> None:
        """The engine gives all ranks their pages of a lease."""
        self._leases[name] = _Lease(request_id, lease, set(self._ranks))

    def given_up(self, request_id: str) -> None:
        """The engine ends the transfer on all ranks."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ending = True

    def heard(
        self, rank: int, fact: RankFact, event: AgentEvent | None = None
    ) -> Iterator[AgentEvent | EndEverywhere]:
        """A fact of a rank; the leader's comes with its event."""
        match fact:
            case RankLeaseEnded():
                yield from self._lease_ended(rank, fact)
            case RankLeaseInDoubt():
                yield from self._lease_in_doubt(fact)
            case RankProgress():
                yield from self._progress(rank, fact, event)
            case RankEnded():
                yield from self._ended(rank, fact)

    def _lease_ended(self, rank: int, fact: RankLeaseEnded) -> Iterator[AgentEvent]:
        held = self._leases[fact.lease]
        held.holders.discard(rank)
        if not held.holders:
            del self._leases[fact.lease]
            yield LeaseEnded(held.request_id, held.lease)

    def _lease_in_doubt(self, fact: RankLeaseInDoubt) -> Iterator[AgentEvent]:
        held = self._leases[fact.lease]
        if not held.in_doubt:
            held.in_doubt = True
            yield LeaseInDoubt(held.request_id, held.lease, fact.reason)

    def _progress(
        self, rank: int, fact: RankProgress, event: AgentEvent | None
    ) -> Iterator[AgentEvent]:
        request = self._request(fact.request_id)
        if request is None:
            return
        if fact.word in OPENING:
            request.opened.add(rank)
        request.said.setdefault(fact.word, set()).add(rank)
        if event is not None:
            request.waiting.append((fact.word, event))
        yield from self._settle(request)

    def _ended(self, rank: int, fact: RankEnded) -> Iterator[AgentEvent | EndEverywhere]:
        request = self._request(fact.request_id)
        if request is None:
            return
        request.opened.add(rank)
        request.ends[rank] = fact
        if fact.outcome != "succeeded" and not request.ending:
            request.ending = True
            yield EndEverywhere(fact.request_id, fact.reason)
        yield from self._settle(request)
        expected = request.opened if request.ending else self._ranks
        if expected <= request.ends.keys():
            del self._requests[fact.request_id]
            self._over.append(fact.request_id)
            if LEADER in request.opened:
                yield _outcome(request)

    def _request(self, request_id: str) -> _Request | None:
        """None for a request that is over."""
        if request_id not in self._requests:
            if request_id in self._over:
                return None
            self._requests[request_id] = _Request(set())
        return self._requests[request_id]

    def _settle(self, request: _Request) -> Iterator[AgentEvent]:
        """The leader's events that every rank has come to, in order. A rank that nobody has pages
        for succeeds without a word.
        """
        done = {rank for rank, end in request.ends.items() if end.outcome == "succeeded"}
        while request.waiting and not request.ending:
            word, event = request.waiting[0]
            if request.said[word] | done != self._ranks:
                return
            request.waiting.popleft()
            yield event


def _outcome(request: _Request) -> SessionEnded:
    ends = request.ends.values()
    request_id = next(iter(ends)).request_id

    def ids(outcome: Outcome, end: RankEnded) -> frozenset[str]:
        return frozenset({request_id}) if end.outcome == OUTCOMES[outcome] else frozenset()

    agreed = agree(
        [
            TransferFacts(
                ids(Outcome.SUCCEEDED, end), ids(Outcome.FAILED, end), ids(Outcome.CANCELLED, end)
            )
            for end in ends
        ]
    )
    outcome = Outcome.SUCCEEDED
    if agreed.failed:
        outcome = Outcome.FAILED
    elif agreed.cancelled:
        outcome = Outcome.CANCELLED
    reason = next(end.reason for end in ends if end.outcome == OUTCOMES[outcome])
    return SessionEnded(
        request_id,
        outcome,
        reason,
        sum(end.transferred_bytes for end in ends),
        max(end.transferred_blocks for end in ends),
    )
