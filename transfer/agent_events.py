"""What a transfer tells the engine. Each session produces these of itself, and ``RequestTransfer``
of all that a rank has for a request: only those reach the engine.

Per request and rank: exactly one ``SessionEnded``; per lease given: exactly one ``LeaseEnded``,
which for a lease in doubt comes only when the peer is known dead. ``SessionEnded`` never waits for
memory and memory never for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.identity import Incarnation
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.outcome import Outcome
from transfer.prefix import Prefix


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """Context side: every generation rank that this rank sends to has room for this request."""

    request_id: str
    generation: Incarnation


@dataclass(frozen=True, slots=True)
class AnnounceReceived:
    """Generation side: the first chunk is about to run on every context rank that sends here;
    allocate, then call ``ready``.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class PullReceived:
    """Source side: a rank asks for a prefix. Call ``found``, ``ship`` and ``hand_off``, or
    ``decline``.
    """

    request_id: str
    puller: Incarnation
    prefix: Prefix
    least_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixFoundReceived:
    """Puller side: the source has blocks up to ``end_block``; allocate, then call ``ready``."""

    request_id: str
    end_block: int


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """Generation side: every wanted page of the blocks before ``end_block`` is in."""

    request_id: str
    end_block: int


@dataclass(frozen=True, slots=True)
class HandoffReceived:
    """Generation side: all pages are in and here are the first tokens; decoding may start."""

    request_id: str
    data: HandoffData | None
    """None on a rank that the leader of the context ranks does not send to; never on a leader."""


@dataclass(frozen=True, slots=True)
class NoDecodeReceived:
    """Generation side: the first token ended the request; forget it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The outcome, once. Bytes and blocks are what had moved when it was decided: bytes over all
    sessions of the request, blocks of the session that moved most.
    """

    request_id: str
    outcome: Outcome
    reason: str
    transferred_bytes: int
    transferred_blocks: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """No posted request touches these pages any more: release them (also out of quarantine)."""

    request_id: str
    lease: TransferLease


@dataclass(frozen=True, slots=True)
class LeaseInDoubt:
    """The peer is lost, not known dead, and may still touch these pages: quarantine them."""

    request_id: str
    lease: TransferLease
    reason: str


AgentEvent = (
    GrantReceived
    | AnnounceReceived
    | PullReceived
    | PrefixFoundReceived
    | ChunkReceived
    | HandoffReceived
    | NoDecodeReceived
    | SessionEnded
    | LeaseEnded
    | LeaseInDoubt
)
