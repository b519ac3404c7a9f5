"""The verbs of a transfer agent as operations of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transfer.identity import PeerAddress
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.prefix import Prefix
from transfer.wire import pack_ints
from worker.transfer_log import (
    AnnounceTransfer,
    CancelTransfer,
    DeclineTransfer,
    FoundTransfer,
    GrantTransfer,
    HandOffTokens,
    HandOffTransfer,
    KeepWarm,
    NoDecodeTransfer,
    PullTransfer,
    ReadyTransfer,
    ShipTransfer,
    TransferOperation,
)


class TransferLog(Protocol):
    """The log as transfers use it; a :class:`worker.recording.LeaderManager` is one."""

    def record(self, operation: TransferOperation) -> None:
        """Add an operation to the next log message."""

    def lease_name(self, lease: TransferLease) -> int:
        """The name of a lease that is not released."""


class TransferRecorder:
    """Writes for whoever follows the log."""

    def __init__(self, log: TransferLog) -> None:
        self._log = log

    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None:
        self._log.record(
            GrantTransfer(
                request_id=request_id,
                sources=tuple(sources),
                prompt_tokens=prompt_tokens,
                deadline_ms=deadline_ms,
            )
        )

    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        name = self._log.lease_name(lease)
        self._log.record(
            ReadyTransfer(
                request_id=request_id, first_block=first_block, end_block=end_block, lease=name
            )
        )

    def announce(self, request_id: str) -> None:
        self._log.record(AnnounceTransfer(request_id=request_id))

    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        name = self._log.lease_name(lease)
        self._log.record(
            ShipTransfer(
                request_id=request_id, first_block=first_block, end_block=end_block, lease=name
            )
        )

    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        self._log.record(HandOffTokens(request_id=request_id, data=handoff))

    def hand_off_pages(self, request_id: str) -> None:
        self._log.record(HandOffTransfer(request_id=request_id))

    def no_decode(self, request_id: str) -> None:
        self._log.record(NoDecodeTransfer(request_id=request_id))

    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None:
        self._log.record(
            PullTransfer(
                request_id=request_id,
                sources=tuple(sources),
                scope=prefix.scope,
                tokens=pack_ints(prefix.tokens),
                least_blocks=least_blocks,
                deadline_ms=deadline_ms,
            )
        )

    def found(self, request_id: str, end_block: int) -> None:
        self._log.record(FoundTransfer(request_id=request_id, end_block=end_block))

    def decline(self, request_id: str, reason: str) -> None:
        self._log.record(DeclineTransfer(request_id=request_id, reason=reason))

    def cancel(self, request_id: str, reason: str) -> None:
        self._log.record(CancelTransfer(request_id=request_id, reason=reason))

    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        self._log.record(KeepWarm(peers=tuple(peers)))
