"""The leader of several ranks: every change of its pages and every step goes into the log.

Used in place of :class:`worker.ranks.RankManager`, so nothing can change the pages unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.lease import PageLease
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from transfer.lease import TransferLease
from transfer.wire import pack_ints
from worker.oplog import (
    AcquireSnapshot,
    AdvanceSequence,
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
from worker.ports import Slice, StepRows
from worker.ranks import RankManager, RankSequence

KEPT_STEPS: Final = 64
"""A follower may be this many steps behind before its checksums mean nothing any more."""


class Follower(Protocol):
    """Another rank, in this process or behind a connection."""

    def apply(self, entries: LogEntries) -> None:
        """Take operations; they are applied in order, not necessarily before this returns."""

    def checksums(self) -> list[StepChecksum]:
        """Checksums that came in since the last call, oldest first."""


class LeaderManager(RankManager):
    """The manager of rank 0 with followers."""

    def __init__(self, manager: UnifiedKVCacheManager, followers: Values[Follower]) -> None:
        super().__init__(manager)
        self._followers = tuple(followers)
        self._lease_names: dict[int, int] = {}
        self._pending: list[Operation] = []
        self._next_number = 1
        self._expected: dict[int, int] = {}

    def record(self, operation: Operation) -> None:
        """Add an operation to the next log message."""
        self._pending.append(operation)

    def name_lease(self, lease: PageLease) -> int:
        """A name for a new lease."""
        name = self._lease_names[id(lease)] = self.mint()
        return name

    def lease_name(self, lease: TransferLease) -> int:
        """The name of a lease that is not released."""
        return self._lease_names[id(lease)]

    @override
    def open(
        self, scope: bytes, tokens: npt.NDArray[np.int32], *, max_match: int
    ) -> LeaderSequence:
        name = self.mint()
        cache = self._manager.open(scope, tokens, max_match=max_match)
        self.record(
            OpenSequence(sequence=name, scope=scope, tokens=pack_ints(tokens), max_match=max_match)
        )
        return LeaderSequence(name, cache, self._groups, self.mint, self)

    @override
    def release(self, lease: TransferLease) -> None:
        super().release(lease)
        self.record(ReleaseLease(lease=self._lease_names.pop(id(lease))))

    @override
    def quarantine(self, lease: TransferLease) -> None:
        super().quarantine(lease)
        self.record(QuarantineLease(lease=self._lease_names[id(lease)]))

    @override
    def run_step(self, step: int, slices: Values[Slice], rows: StepRows) -> None:
        """Send the log up to and with this step, and compare what followers said of earlier ones:
        a step late, so that no rank waits for another. Raises RanksDiverged.
        """
        self.record(
            RunStep(
                step=step,
                slices=tuple(
                    RunSlice(
                        sequence=part.sequence,
                        start=part.start,
                        tokens=pack_ints(part.tokens),
                        draws=bool(part.draws),
                        keeps=0 if part.snapshot is None else part.snapshot.length,
                        feed=part.feed,
                    )
                    for part in slices
                ),
                rows=rows.tokens,
                draws=rows.draws,
            )
        )
        tables = (part.block_tables for part in slices)
        number = self._next_number + len(self._pending) - 1
        self._expected[step] = checksum(number, tables)
        for follower in self._followers:
            self._compare(follower)
        self.flush()
        self._expected.pop(step - KEPT_STEPS, None)

    @override
    def end_step(self, step: int) -> None:
        self.record(EndStep(step=step))

    @override
    def flush(self) -> None:
        if not self._pending:
            return
        entries = LogEntries(first_number=self._next_number, operations=tuple(self._pending))
        self._next_number += len(self._pending)
        self._pending.clear()
        for follower in self._followers:
            follower.apply(entries)

    def _compare(self, follower: Follower) -> None:
        for answer in follower.checksums():
            expected = self._expected.get(answer.step)
            if expected != answer.checksum:
                raise RanksDiverged(
                    f"step {answer.step}: the leader's page tables have checksum {expected}, "
                    f"a follower's {answer.checksum}; the instance must be restarted"
                )


class LeaderSequence(RankSequence):
    """One sequence of the leader. An operation is recorded after it was done here."""

    def __init__(
        self,
        name: int,
        cache: SequenceCache,
        groups: range,
        mint: Callable[[], int],
        leader: LeaderManager,
    ) -> None:
        super().__init__(name, cache, groups, mint)
        self._leader = leader

    @override
    def grow(self, capacity: int) -> bool:
        granted = super().grow(capacity)
        self._leader.record(GrowSequence(sequence=self.name, capacity=capacity, granted=granted))
        return granted

    @override
    def grow_to_receive(self, capacity: int) -> bool:
        granted = super().grow_to_receive(capacity)
        self._leader.record(GrowToReceive(sequence=self.name, capacity=capacity, granted=granted))
        return granted

    @override
    def advance(self, history: int) -> None:
        super().advance(history)
        self._leader.record(AdvanceSequence(sequence=self.name, history=history))

    @override
    def commit(self, tokens: npt.NDArray[np.int32]) -> None:
        super().commit(tokens)
        self._leader.record(CommitSequence(sequence=self.name, tokens=pack_ints(tokens)))

    @override
    def acquire_snapshot_slot(self) -> int | None:
        slot = super().acquire_snapshot_slot()
        self._leader.record(AcquireSnapshot(sequence=self.name, granted=slot is not None))
        return slot

    @override
    def commit_with_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        kept = super().commit_with_snapshot(tokens)
        packed = pack_ints(tokens)
        self._leader.record(CommitSnapshot(sequence=self.name, tokens=packed, kept=kept))
        return kept

    @override
    def commit_with_live_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        kept = super().commit_with_live_snapshot(tokens)
        packed = pack_ints(tokens)
        self._leader.record(CommitLiveSnapshot(sequence=self.name, tokens=packed, kept=kept))
        return kept

    @override
    def fork(self) -> LeaderSequence | None:
        cache = self._cache.fork()
        name = None if cache is None else self._mint()
        self._leader.record(ForkSequence(sequence=self.name, branch=name))
        if cache is None or name is None:
            return None
        return LeaderSequence(name, cache, self._groups, self._mint, self._leader)

    @override
    def suspend(self) -> None:
        super().suspend()
        self._leader.record(SuspendSequence(sequence=self.name))

    @override
    def resume(self) -> bool:
        granted = super().resume()
        self._leader.record(ResumeSequence(sequence=self.name, granted=granted))
        return granted

    @override
    def close(self) -> None:
        super().close()
        self._leader.record(CloseSequence(sequence=self.name))

    @override
    def lease(self, first_block: int, end_block: int) -> PageLease:
        lease = super().lease(first_block, end_block)
        name = self._leader.name_lease(lease)
        self._leader.record(
            LeaseBlocks(
                sequence=self.name, lease=name, first_block=first_block, end_block=end_block
            )
        )
        return lease
