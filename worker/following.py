"""A follower: it applies the log to its own pages, its own agent and its part of the model.

Nothing is decided here. Steps are computed where they stand in the log, so that all ranks come to
their sums in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from kvcache_core.manager import UnifiedKVCacheManager
from transfer.agent_events import AgentEvent, LeaseEnded, LeaseInDoubt
from transfer.prefix import Prefix
from transfer.wire import unpack_ints
from worker.agreement import fact_of
from worker.group_facts import group_fact_of
from worker.oplog import EndStep, LogEntries, Operation, ReleaseLease, RunStep, StepChecksum
from worker.ports import Slice, StepRows, Transfers
from worker.rank_facts import GroupFact
from worker.replica import RankReplica
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
)


class FollowerTransfers(Transfers, Protocol):
    """A follower's agent."""

    def hand_off_pages(self, request_id: str) -> None: ...


class Partner(Protocol):
    """The model of a follower."""

    def begin(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> Callable[[], None]:
        """This rank's part of a step. ``drawing`` says from which slices the leader draws,
        ``rows`` what all dp groups compute. What is returned waits for the end of the step.
        """


class RankFollower(RankReplica):
    """One rank that follows. Used by one thread, except ``report``."""

    def __init__(
        self,
        manager: UnifiedKVCacheManager,
        transfers: FollowerTransfers,
        partner: Partner,
        tell: Callable[[StepChecksum | GroupFact], None],
    ) -> None:
        super().__init__(manager)
        self._transfers = transfers
        self._partner = partner
        self._tell = tell
        self._names: dict[int, int] = {}
        self._ends: dict[int, Callable[[], None]] = {}

    def report(self, event: AgentEvent) -> None:
        """Tell the leader what this rank's agent reports. In the agent's thread."""
        lease = 0
        if isinstance(event, LeaseEnded | LeaseInDoubt):
            lease = self._names[id(event.lease)]
        fact = self._fact(event, lease)
        if fact is not None:
            self._tell(fact)

    def _fact(self, event: AgentEvent, lease: int) -> GroupFact | None:
        return fact_of(event, lease)

    @override
    def apply(self, entries: LogEntries) -> None:
        super().apply(entries)
        for answer in self.checksums():
            self._tell(answer)

    @override
    def _run(self, step: RunStep) -> None:
        super()._run(step)
        self.steps.pop()
        self._ends[step.step] = self._partner.begin(
            [
                Slice(
                    part.sequence,
                    unpack_ints(part.tokens),
                    part.start,
                    self.tables(part.sequence),
                    (),
                    self.snapshot(part),
                    part.feed,
                )
                for part in step.slices
            ],
            [part.draws for part in step.slices],
            StepRows(step.rows, step.draws),
        )

    @override
    def _apply(self, operation: Operation) -> None:
        match operation:
            case EndStep():
                self._ends.pop(operation.step)()
            case ReadyTransfer() | ShipTransfer():
                self._lend(operation)
            case ReleaseLease():
                # No transfer had it where it kept pages for a step under way.
                self._names.pop(id(self.lease(operation.lease)), None)
                super()._apply(operation)
            case GrantTransfer():
                self._transfers.grant(
                    operation.request_id,
                    operation.sources,
                    operation.prompt_tokens,
                    operation.deadline_ms,
                )
            case PullTransfer():
                prefix = Prefix(operation.scope, unpack_ints(operation.tokens))
                self._transfers.pull(
                    operation.request_id,
                    operation.sources,
                    prefix,
                    operation.least_blocks,
                    operation.deadline_ms,
                )
            case (
                AnnounceTransfer()
                | HandOffTransfer()
                | HandOffTokens()
                | NoDecodeTransfer()
                | FoundTransfer()
                | DeclineTransfer()
                | CancelTransfer()
                | KeepWarm()
            ):
                self._say(operation)
            case _:
                super()._apply(operation)

    def _lend(self, operation: ReadyTransfer | ShipTransfer) -> None:
        lease = self.lease(operation.lease)
        self._names[id(lease)] = operation.lease
        give = self._transfers.ready
        if isinstance(operation, ShipTransfer):
            give = self._transfers.ship
        give(operation.request_id, operation.first_block, operation.end_block, lease)

    def _say(
        self,
        operation: AnnounceTransfer
        | HandOffTransfer
        | HandOffTokens
        | NoDecodeTransfer
        | FoundTransfer
        | DeclineTransfer
        | CancelTransfer
        | KeepWarm,
    ) -> None:
        transfers = self._transfers
        match operation:
            case AnnounceTransfer():
                transfers.announce(operation.request_id)
            case HandOffTransfer():
                transfers.hand_off_pages(operation.request_id)
            case HandOffTokens():
                transfers.hand_off(operation.request_id, operation.data)
            case NoDecodeTransfer():
                transfers.no_decode(operation.request_id)
            case FoundTransfer():
                transfers.found(operation.request_id, operation.end_block)
            case DeclineTransfer():
                transfers.decline(operation.request_id, operation.reason)
            case CancelTransfer():
                transfers.cancel(operation.request_id, operation.reason)
            case KeepWarm():
                transfers.keep_warm(operation.peers)


class GroupFollower(RankFollower):
    """A follower that is a dp group: its log is about its own requests alone, and it tells the
    whole of what its agent reports.
    """

    @override
    def _fact(self, event: AgentEvent, lease: int) -> GroupFact | None:
        return group_fact_of(event, lease)
