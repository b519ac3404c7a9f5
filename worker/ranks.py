"""Leader and followers of one instance: the leader's manager writes the log, a replica applies it.

``LeaderManager`` is the engine's only way to pages, so nothing can change them unseen. Without
followers it records nothing and adds one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Values
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.lease import PageLease
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from transfer.lease import TransferLease
from transfer.wire import pack_ints, unpack_ints
from worker.oplog import (
    AdvanceSequence,
    BlockTables,
    CloseSequence,
    CommitSequence,
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
from worker.ports import BlockCounts, CacheManager, CacheSequence, Slice


class Follower(Protocol):
    """Another rank, in this process or behind a connection."""

    def apply(self, entries: LogEntries) -> None:
        """Take operations; they are applied in order, not necessarily before this returns."""

    def checksums(self) -> list[StepChecksum]:
        """Checksums that came in since the last call, oldest first."""


class LeaderManager(CacheManager):
    """The manager of rank 0, with every change of it in the log."""

    def __init__(self, manager: UnifiedKVCacheManager, followers: Values[Follower] = ()) -> None:
        self._manager = manager
        self._groups = len(manager.plan.layer_groups)
        self._followers = tuple(followers)
        self._names = count(1)
        self._leases: dict[int, int] = {}
        self._pending: list[Operation] = []
        self._next_number = 1
        self._expected: dict[int, int] = {}

    def record(self, operation: Operation) -> None:
        """Add an operation to the next log message."""
        if self._followers:
            self._pending.append(operation)

    def mint(self) -> int:
        """A new name for a sequence or a lease."""
        return next(self._names)

    def lease_named(self, lease: PageLease, name: int) -> None:
        """Remember the name of a lease until it ends."""
        self._leases[id(lease)] = name

    @property
    def groups(self) -> int:
        """Layer groups of the plan."""
        return self._groups

    @override
    def open(
        self, scope: bytes, tokens: npt.NDArray[np.int32], *, max_match: int
    ) -> LeaderSequence:
        name = self.mint()
        if self._followers:
            self.record(
                OpenSequence(
                    sequence=name, scope=scope, tokens=pack_ints(tokens), max_match=max_match
                )
            )
        return LeaderSequence(self, name, self._manager.open(scope, tokens, max_match=max_match))

    @override
    def release(self, lease: TransferLease) -> None:
        self.record(ReleaseLease(lease=self._leases.pop(id(lease))))
        lease.release()

    @override
    def quarantine(self, lease: TransferLease) -> None:
        self.record(QuarantineLease(lease=self._leases[id(lease)]))
        lease.quarantine()

    @override
    def available_slots(self) -> tuple[int, ...]:
        return tuple(usage.available for usage in self._manager.usage())

    @override
    def total_slots(self) -> tuple[int, ...]:
        return tuple(usage.total - usage.quarantined for usage in self._manager.usage())

    @override
    def block_counts(self) -> BlockCounts:
        scarcest = min(self._manager.usage(), key=lambda usage: usage.available)
        return BlockCounts(scarcest.total, scarcest.available, scarcest.cached)

    @override
    def run_step(self, step: int, slices: Values[Slice]) -> None:
        # The comparison is a step late, so that no rank waits for another.
        if not self._followers:
            return
        self._pending.append(
            RunStep(
                step=step,
                slices=tuple(
                    RunSlice(
                        sequence=part.sequence,
                        start=part.start,
                        tokens=pack_ints(part.tokens),
                        draws=bool(part.draws),
                    )
                    for part in slices
                ),
            )
        )
        entries = LogEntries(first_number=self._next_number, operations=tuple(self._pending))
        self._next_number += len(self._pending)
        self._pending.clear()
        self._expected[step] = checksum(
            self._next_number - 1, (part.block_tables for part in slices)
        )
        for follower in self._followers:
            self._compare(follower)
            follower.apply(entries)
        self._expected.pop(step - KEPT_STEPS, None)

    def _compare(self, follower: Follower) -> None:
        for answer in follower.checksums():
            expected = self._expected.get(answer.step)
            if expected != answer.checksum:
                raise RanksDiverged(
                    f"step {answer.step}: the leader's page tables have checksum {expected}, "
                    f"a follower's {answer.checksum}; the instance must be restarted"
                )


KEPT_STEPS = 64


class LeaderSequence(CacheSequence):
    """One sequence of the leader's manager."""

    def __init__(self, leader: LeaderManager, name: int, cache: SequenceCache) -> None:
        self._leader = leader
        self._name = name
        self._cache = cache

    @property
    @override
    def name(self) -> int:
        return self._name

    @property
    @override
    def matched_tokens(self) -> int:
        return self._cache.matched_tokens

    @property
    @override
    def committed(self) -> int:
        return self._cache.committed

    @property
    @override
    def history(self) -> int:
        return self._cache.history

    @property
    @override
    def capacity(self) -> int:
        return self._cache.capacity

    @override
    def grow(self, capacity: int) -> bool:
        granted = self._cache.grow(capacity)
        self._leader.record(GrowSequence(sequence=self.name, capacity=capacity, granted=granted))
        return granted

    @override
    def grow_to_receive(self, capacity: int) -> bool:
        granted = self._cache.grow_to_receive(capacity)
        self._leader.record(GrowToReceive(sequence=self.name, capacity=capacity, granted=granted))
        return granted

    @override
    def advance(self, history: int) -> None:
        self._cache.advance(history)
        self._leader.record(AdvanceSequence(sequence=self.name, history=history))

    @override
    def commit(self, tokens: npt.NDArray[np.int32]) -> None:
        self._cache.commit(tokens)
        self._leader.record(CommitSequence(sequence=self.name, tokens=pack_ints(tokens)))

    @override
    def fork(self) -> LeaderSequence | None:
        cache = self._cache.fork()
        branch = None if cache is None else LeaderSequence(self._leader, self._leader.mint(), cache)
        self._leader.record(
            ForkSequence(sequence=self.name, branch=None if branch is None else branch.name)
        )
        return branch

    @override
    def suspend(self) -> None:
        self._cache.suspend()
        self._leader.record(SuspendSequence(sequence=self.name))

    @override
    def resume(self) -> bool:
        granted = self._cache.resume()
        self._leader.record(ResumeSequence(sequence=self.name, granted=granted))
        return granted

    @override
    def close(self) -> None:
        self._cache.close()
        self._leader.record(CloseSequence(sequence=self.name))

    @override
    def block_tables(self) -> BlockTables:
        return tuple(self._cache.block_table(group) for group in range(self._leader.groups))

    @override
    def lease(self, first_block: int, end_block: int) -> PageLease:
        lease = self._cache.lease(first_block, end_block)
        name = self._leader.mint()
        self._leader.lease_named(lease, name)
        self._leader.record(
            LeaseBlocks(
                sequence=self.name, lease=name, first_block=first_block, end_block=end_block
            )
        )
        return lease


class RankReplica(Follower):
    """A follower's manager, kept equal to the leader's by the log alone.

    ``steps`` gives what to compute; the owner of the replica takes it from there.
    """

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
            case _:
                self._change(operation)

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
