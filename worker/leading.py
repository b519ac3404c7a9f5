"""The transfers of an instance of several ranks, as its leader's engine sees them.

Every verb goes to the leader's own agent and, through the log, to every follower's; what comes back
is what all ranks agree on. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from transfer.agent_events import AgentEvent, LeaseEnded, LeaseInDoubt
from transfer.agent_figures import TransferFigures
from transfer.identity import PeerAddress
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.prefix import Prefix
from worker.agreement import LEADER, EndEverywhere, TransferAgreement, fact_of
from worker.inbox import RankReported
from worker.ports import Agreement, Transfers
from worker.rank_facts import RankFact
from worker.transfer_recording import TransferLog, TransferRecorder


class LeaderTransfers(Transfers, Agreement):
    """The agents of ``size`` ranks as one."""

    def __init__(self, own: Transfers, log: TransferLog, size: int) -> None:
        self._own = own
        self._log = log
        self._recorder = TransferRecorder(log)
        self._agreement = TransferAgreement(size)

    @override
    def heard(self, item: AgentEvent | RankReported) -> list[AgentEvent]:
        if isinstance(item, RankReported):
            if not isinstance(item.fact, RankFact):
                raise TypeError(f"rank {item.rank} is no dp group, but says {item.fact.kind}")
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
        self._recorder.grant(request_id, sources, prompt_tokens, deadline_ms)
        self._own.grant(request_id, sources, prompt_tokens, deadline_ms)

    @override
    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        self._agreement.lent(request_id, self._log.lease_name(lease), lease)
        self._recorder.ready(request_id, first_block, end_block, lease)
        self._own.ready(request_id, first_block, end_block, lease)

    @override
    def announce(self, request_id: str) -> None:
        self._recorder.announce(request_id)
        self._own.announce(request_id)

    @override
    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        self._agreement.lent(request_id, self._log.lease_name(lease), lease)
        self._recorder.ship(request_id, first_block, end_block, lease)
        self._own.ship(request_id, first_block, end_block, lease)

    @override
    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        self._recorder.hand_off_pages(request_id)
        self._own.hand_off(request_id, handoff)

    @override
    def no_decode(self, request_id: str) -> None:
        self._recorder.no_decode(request_id)
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
        self._recorder.pull(request_id, sources, prefix, least_blocks, deadline_ms)
        self._own.pull(request_id, sources, prefix, least_blocks, deadline_ms)

    @override
    def found(self, request_id: str, end_block: int) -> None:
        self._recorder.found(request_id, end_block)
        self._own.found(request_id, end_block)

    @override
    def decline(self, request_id: str, reason: str) -> None:
        self._recorder.decline(request_id, reason)
        self._own.decline(request_id, reason)

    @override
    def cancel(self, request_id: str, reason: str) -> None:
        self._agreement.given_up(request_id)
        self._recorder.cancel(request_id, reason)
        self._own.cancel(request_id, reason)

    @override
    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        self._recorder.keep_warm(peers)
        self._own.keep_warm(peers)

    @property
    @override
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        return self._own.refusals

    @property
    @override
    def figures(self) -> TransferFigures:
        return self._own.figures
