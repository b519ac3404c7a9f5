"""The transfers of a dp group whose pages are on another rank, as the leader's engine sees them.

Its verbs go through that rank's log alone, and what its agent says is the whole truth about them:
no other rank has a part in its requests. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from typing_extensions import override

from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.agent_figures import TransferFigures
from transfer.lease import TransferLease
from transfer.outcome import Outcome
from transfer.prefix import Prefix
from transfer.wire import unpack_ints
from worker.agreement import OUTCOMES
from worker.inbox import RankReported
from worker.ports import Agreement, Transfers
from worker.rank_facts import (
    GroupFact,
    RankAsked,
    RankEnded,
    RankFound,
    RankGranted,
    RankHandedOff,
    RankLeaseEnded,
    RankLeaseInDoubt,
    RankProgress,
)
from worker.transfer_recording import TransferLog, TransferRecorder

_OUTCOMES: Final[dict[str, Outcome]] = {told: outcome for outcome, told in OUTCOMES.items()}


class GroupTransfers(TransferRecorder, Transfers, Agreement):
    """The agent of another rank."""

    def __init__(self, log: TransferLog) -> None:
        super().__init__(log)
        self._lent: dict[int, tuple[str, TransferLease]] = {}

    @override
    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        self._lent[self._log.lease_name(lease)] = (request_id, lease)
        super().ready(request_id, first_block, end_block, lease)

    @override
    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        self._lent[self._log.lease_name(lease)] = (request_id, lease)
        super().ship(request_id, first_block, end_block, lease)

    @override
    def heard(self, item: AgentEvent | RankReported) -> Sequence[AgentEvent]:
        if not isinstance(item, RankReported):
            raise TypeError(f"expected what another rank says, got {item}")
        return (self._event(item.fact),)

    def _event(self, fact: GroupFact) -> AgentEvent:
        match fact:
            case RankGranted():
                return GrantReceived(fact.request_id, fact.generation)
            case RankAsked():
                prefix = Prefix(fact.scope, unpack_ints(fact.tokens))
                return PullReceived(fact.request_id, fact.puller, prefix, fact.least_blocks)
            case RankFound():
                return PrefixFoundReceived(fact.request_id, fact.end_block)
            case RankHandedOff():
                return HandoffReceived(fact.request_id, fact.data)
            case RankProgress(word="announced"):
                return AnnounceReceived(fact.request_id)
            case RankProgress(word="no_decode"):
                return NoDecodeReceived(fact.request_id)
            case RankProgress():
                raise ValueError(
                    f"a dp group says all of {fact.word!r}, not that it has come to it"
                )
            case RankEnded():
                return SessionEnded(
                    fact.request_id,
                    _OUTCOMES[fact.outcome],
                    fact.reason,
                    fact.transferred_bytes,
                    fact.transferred_blocks,
                )
            case RankLeaseEnded():
                return LeaseEnded(*self._lent.pop(fact.lease))
            case RankLeaseInDoubt():
                request_id, lease = self._lent[fact.lease]
                return LeaseInDoubt(request_id, lease, fact.reason)

    @property
    @override
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        """That rank logs them itself."""
        return {}

    @property
    @override
    def figures(self) -> TransferFigures:
        """The leader's stand for those of all: every rank is paired alike."""
        return TransferFigures()
