"""The transfers of an instance of several ranks, as its leader's engine sees them.

Every verb goes to the leader's own agent and, through the log, to every follower's; what comes back
is what all ranks agree on. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from transfer.agent_events import AgentEvent, LeaseEnded, LeaseInDoubt
from transfer.agent_figures import TransferFigures
from transfer.identity import PeerAddress
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.prefix import Prefix
from transfer.wire import pack_ints
from worker.agreement import LEADER, EndEverywhere, TransferAgreement, fact_of
from worker.inbox import RankReported
from worker.ports import Agreement, Transfers
from worker.rank_facts import RankFact
from worker.transfer_log import (
    AnnounceTransfer,
    CancelTransfer,
    DeclineTransfer,
    FoundTransfer,
    GrantTransfer,
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


class LeaderTransfers(Transfers, Agreement):
    """The agents of ``size`` ranks as one."""

    def __init__(self, own: Transfers, log: TransferLog, size: int) -> None:
        self._own = own
        self._log = log
        self._agreement = TransferAgreement(size)

    @override
    def heard(self, item: AgentEvent | RankReported) -> list[AgentEvent]:
        if isinstance(item, RankReported):
            return self._take(item.rank, item.fact, None)
        lease = 0
        if isinstance(item, LeaseEnded | LeaseInDoubt):
            lease = self._log.lease_name(item.lease)
        fact = fact_of(item, lease)
        return [] if fact is None else self._take(LEADER, fact, item)

    def _take(self, rank: int, fact: RankFact, event: AgentEvent | None) -> list[AgentEvent]:
        events: list[AgentEvent] = []
        for found in self._agreement.heard(rank, fact, event):
            if isinstance(found, EndEverywhere):
                self.cancel(found.request_id, found.reason)
            else:
                events.append(found)
        return events

    @override
    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None:
        self._agreement.begun(request_id)
        self._log.record(
            GrantTransfer(
                request_id=request_id,
                sources=tuple(sources),
                prompt_tokens=prompt_tokens,
                deadline_ms=deadline_ms,
            )
        )
        self._own.grant(request_id, sources, prompt_tokens, deadline_ms)

    @override
    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        self._lend(ReadyTransfer, request_id, first_block, end_block, lease)
        self._own.ready(request_id, first_block, end_block, lease)

    @override
    def announce(self, request_id: str) -> None:
        self._log.record(AnnounceTransfer(request_id=request_id))
        self._own.announce(request_id)

    @override
    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        self._lend(ShipTransfer, request_id, first_block, end_block, lease)
        self._own.ship(request_id, first_block, end_block, lease)

    def _lend(
        self,
        make: Callable[..., ReadyTransfer | ShipTransfer],
        request_id: str,
        first_block: int,
        end_block: int,
        lease: TransferLease,
    ) -> None:
        name = self._log.lease_name(lease)
        self._agreement.lent(request_id, name, lease)
        self._log.record(
            make(request_id=request_id, first_block=first_block, end_block=end_block, lease=name)
        )

    @override
    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        self._log.record(HandOffTransfer(request_id=request_id))
        self._own.hand_off(request_id, handoff)

    @override
    def no_decode(self, request_id: str) -> None:
        self._log.record(NoDecodeTransfer(request_id=request_id))
        self._own.no_decode(request_id)

    @override
    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None:
        self._agreement.begun(request_id)
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
        self._own.pull(request_id, sources, prefix, least_blocks, deadline_ms)

    @override
    def found(self, request_id: str, end_block: int) -> None:
        self._log.record(FoundTransfer(request_id=request_id, end_block=end_block))
        self._own.found(request_id, end_block)

    @override
    def decline(self, request_id: str, reason: str) -> None:
        self._log.record(DeclineTransfer(request_id=request_id, reason=reason))
        self._own.decline(request_id, reason)

    @override
    def cancel(self, request_id: str, reason: str) -> None:
        self._agreement.given_up(request_id)
        self._log.record(CancelTransfer(request_id=request_id, reason=reason))
        self._own.cancel(request_id, reason)

    @override
    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        self._log.record(KeepWarm(peers=tuple(peers)))
        self._own.keep_warm(peers)

    @property
    @override
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        return self._own.refusals

    @property
    @override
    def figures(self) -> TransferFigures:
        return self._own.figures
