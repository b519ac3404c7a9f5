"""A follower's pages: a manager of its own that the log alone keeps equal to the leader's."""

from __future__ import annotations

from collections import deque

from typing_extensions import override

from kvcache_core.lease import PageLease
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from transfer.wire import unpack_ints
from worker.oplog import (
    AcquireSnapshot,
    AdvanceSequence,
    BlockTables,
    CloseSequence,
    CommitLiveSnapshot,
    CommitSequence,
    CommitSnapshot,
    EndStep,
    ForkSequence,
    GrowSequence,
    GrowToReceive,
    LeaseBlocks,
    LogEntries,
    OpenSequence,
    Operation,
    QuarantineLease,
    RanksDiverged,
    ReleaseLease,
    ResumeSequence,
    RunSlice,
    RunStep,
    StepChecksum,
    SuspendSequence,
    checksum,
)
from worker.ports import StateSnapshot
from worker.recording import Follower


class RankReplica(Follower):
    """Applies the log; ``steps`` gives what to compute, for the owner of the replica to take."""

    def __init__(self, manager: UnifiedKVCacheManager) -> None:
        self._manager = manager
        self._groups = len(manager.plan.layer_groups)
        self._sequences: dict[int, SequenceCache] = {}
        self._leases: dict[int, PageLease] = {}
        self._next_number = 1
        self._answers: deque[StepChecksum] = deque()
        self.steps: deque[RunStep] = deque()

    def tables(self, sequence: int) -> BlockTables:
        """Block tables of one sequence, one a layer group."""
        cache = self._sequences[sequence]
        return tuple(cache.block_table(group) for group in range(self._groups))

    def snapshot(self, part: RunSlice) -> StateSnapshot | None:
        """The state that a slice keeps in mid-chunk, in this rank's slot."""
        slot = self._sequences[part.sequence].pending_snapshot_slot if part.keeps else None
        return None if slot is None else StateSnapshot(part.keeps, slot)

    def lease(self, name: int) -> PageLease:
        """A lease that is not released. Raises KeyError."""
        return self._leases[name]

    @override
    def checksums(self) -> list[StepChecksum]:
        answers = list(self._answers)
        self._answers.clear()
        return answers

    @override
    def apply(self, entries: LogEntries) -> None:
        """Apply in order. Raises RanksDiverged for a gap or an operation that went otherwise on the
        leader.
        """
        if entries.first_number != self._next_number:
            raise RanksDiverged(
                f"operation log: expected number {self._next_number}, got {entries.first_number}"
            )
        for operation in entries.operations:
            self._apply(operation)
            self._next_number += 1

    def _apply(self, operation: Operation) -> None:
        match operation:
            case OpenSequence():
                self._sequences[operation.sequence] = self._manager.open(
                    operation.scope,
                    unpack_ints(operation.tokens),
                    max_match=operation.max_match,
                )
            case LeaseBlocks():
                self._leases[operation.lease] = self._sequences[operation.sequence].lease(
                    operation.first_block, operation.end_block
                )
            case ReleaseLease():
                self._leases.pop(operation.lease).release()
            case QuarantineLease():
                self._leases[operation.lease].quarantine()
            case RunStep():
                self._run(operation)
            case EndStep():
                pass  # pages alone wait for nothing
            case AcquireSnapshot() | CommitSnapshot() | CommitLiveSnapshot():
                self._keep(operation)
            case (
                GrowSequence()
                | GrowToReceive()
                | AdvanceSequence()
                | CommitSequence()
                | ForkSequence()
                | SuspendSequence()
                | ResumeSequence()
                | CloseSequence()
            ):
                self._change(operation)
            case _:
                raise RanksDiverged(
                    f"operation {self._next_number} ({operation.kind}): expected one about pages, "
                    "this rank has no transfers"
                )

    def _change(
        self,
        operation: GrowSequence
        | GrowToReceive
        | AdvanceSequence
        | CommitSequence
        | ForkSequence
        | SuspendSequence
        | ResumeSequence
        | CloseSequence,
    ) -> None:
        cache = self._sequences[operation.sequence]
        match operation:
            case GrowSequence():
                self._agree(operation, operation.granted, cache.grow(operation.capacity))
            case GrowToReceive():
                granted = cache.grow_to_receive(operation.capacity)
                self._agree(operation, operation.granted, granted)
            case AdvanceSequence():
                cache.advance(operation.history)
            case CommitSequence():
                cache.commit(unpack_ints(operation.tokens))
            case ForkSequence():
                branch = cache.fork()
                self._agree(operation, operation.branch is not None, branch is not None)
                if operation.branch is not None and branch is not None:
                    self._sequences[operation.branch] = branch
            case SuspendSequence():
                cache.suspend()
            case ResumeSequence():
                self._agree(operation, operation.granted, cache.resume())
            case CloseSequence():
                cache.close()
                del self._sequences[operation.sequence]

    def _keep(self, operation: AcquireSnapshot | CommitSnapshot | CommitLiveSnapshot) -> None:
        cache = self._sequences[operation.sequence]
        match operation:
            case AcquireSnapshot():
                granted = cache.acquire_snapshot_slot() is not None
                self._agree(operation, operation.granted, granted)
            case CommitSnapshot():
                kept = cache.commit_with_snapshot(unpack_ints(operation.tokens))
                self._agree(operation, operation.kept, kept)
            case CommitLiveSnapshot():
                kept = cache.commit_with_live_snapshot(unpack_ints(operation.tokens))
                self._agree(operation, operation.kept, kept)

    def _agree(self, operation: Operation, leader: object, here: object) -> None:
        if leader != here:
            raise RanksDiverged(
                f"operation {self._next_number} ({operation.kind}): the leader got {leader}, "
                f"this rank {here}; the instance must be restarted"
            )

    def _run(self, step: RunStep) -> None:
        self.steps.append(step)
        value = checksum(self._next_number, (self.tables(part.sequence) for part in step.slices))
        self._answers.append(StepChecksum(step=step.step, checksum=value))
