"""The engine's way to the pages of rank 0: the manager and its sequences behind the engine's ports.

With more ranks than one the same calls go through :mod:`worker.recording`, which writes the log.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from itertools import count

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.branch_points import branch_point
from kvcache_core.counters_report import CountersReport
from kvcache_core.hashing import Prompt
from kvcache_core.lease import PageLease
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ReusePolicy
from transfer.lease import TransferLease
from worker.oplog import BlockTables
from worker.ports import (
    AwaitedPrefix,
    BlockCounts,
    CacheManager,
    CacheSequence,
    CacheTotals,
    Slice,
    StepRows,
)


class RankSequence(CacheSequence):
    """One sequence of the manager, with the name that all ranks know it by."""

    def __init__(
        self, name: int, cache: SequenceCache, groups: range, mint: Callable[[], int]
    ) -> None:
        self._name = name
        self._cache = cache
        self._groups = groups
        self._mint = mint
        self._tables: BlockTables | None = None
        """As long as they are the same arrays, which are updated in place."""

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
    def host_matched_tokens(self) -> int:
        return self._cache.host_matched_tokens

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

    @property
    @override
    def is_resident(self) -> bool:
        return self._cache.is_resident

    @override
    def grow(self, capacity: int) -> bool:
        self._tables = None
        return self._cache.grow(capacity)

    @override
    def grow_to_receive(self, capacity: int) -> bool:
        self._tables = None
        return self._cache.grow_to_receive(capacity)

    @override
    def advance(self, history: int) -> None:
        self._cache.advance(history)

    @override
    def commit(self, tokens: npt.NDArray[np.int32]) -> None:
        self._cache.commit(tokens)

    @override
    def acquire_snapshot_slot(self) -> int | None:
        return self._cache.acquire_snapshot_slot()

    @override
    def commit_with_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        return self._cache.commit_with_snapshot(tokens)

    @override
    def commit_with_live_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        return self._cache.commit_with_live_snapshot(tokens)

    @override
    def fork(self) -> RankSequence | None:
        cache = self._cache.fork()
        return (
            None if cache is None else RankSequence(self._mint(), cache, self._groups, self._mint)
        )

    @override
    def suspend(self) -> None:
        self._tables = None
        self._cache.suspend()

    @override
    def resume(self) -> bool:
        self._tables = None
        return self._cache.resume()

    @override
    def close(self) -> None:
        self._cache.close()

    @override
    def announce(self) -> None:
        self._cache.announce_opened()

    @override
    def block_tables(self) -> BlockTables:
        if self._tables is None:
            table = self._cache.block_table
            self._tables = tuple([table(group) for group in self._groups])
        return self._tables

    @override
    def lease(self, first_block: int, end_block: int) -> PageLease:
        return self._cache.lease(first_block, end_block)


class RankManager(CacheManager):
    """The manager of the only rank of an instance."""

    def __init__(self, manager: UnifiedKVCacheManager) -> None:
        self._manager = manager
        self._groups = range(len(manager.plan.layer_groups))
        shared = [
            group
            for group in manager.plan.layer_groups
            if group.life_cycle.is_state and group.life_cycle.policy is not ReusePolicy.PRIVATE
        ]
        self._keeps_states = len(shared) == 1
        self._names = count(1)
        self._report = CountersReport()

    def mint(self) -> int:
        """A new name for a sequence or a lease."""
        return next(self._names)

    @property
    @override
    def tokens_per_block(self) -> int:
        return self._manager.plan.tokens_per_block

    @override
    def open(self, scope: bytes, tokens: npt.NDArray[np.int32], *, max_match: int) -> RankSequence:
        cache = self._manager.open(scope, tokens, max_match=max_match)
        return RankSequence(self.mint(), cache, self._groups, self.mint)

    @override
    def prompt(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> Prompt:
        return self._manager.prompt(scope, tokens)

    @override
    def known_tokens(self, prompt: Prompt) -> int:
        return self._manager.look(prompt).reusable_tokens

    @override
    def awaited_prefix(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> AwaitedPrefix | None:
        manager = self._manager
        if not manager.has_announced:
            return None
        prompt = manager.prompt(scope, tokens)
        reuse = manager.look(prompt)
        if not reuse.in_flight_tokens or reuse.reusable_tokens < reuse.known_tokens:
            return None  # what is missing before them would have to be computed all the same
        size = manager.plan.tokens_per_block
        end = reuse.known_tokens // size + reuse.in_flight_tokens // size
        manager.count_prefix_wait()
        return AwaitedPrefix(prompt.keys(end)[end - 1], reuse.in_flight_tokens, end * size)

    @override
    def uncached_tokens(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> int:
        reuse = self._manager.look(self._manager.prompt(scope, tokens))
        found = reuse.reusable_tokens
        if reuse.in_flight_tokens and found == reuse.known_tokens:
            found += reuse.in_flight_tokens - found % self.tokens_per_block
        return len(tokens) - found

    @override
    def is_announced(self, key: bytes) -> bool:
        return self._manager.is_announced(key)

    @property
    @override
    def keeps_states(self) -> bool:
        return self._keeps_states

    @override
    def branch_point(
        self, scope: bytes, tokens: npt.NDArray[np.int32], position: int
    ) -> int | None:
        manager = self._manager
        branch = branch_point(
            manager.look(manager.prompt(scope, tokens)),
            looked_up_tokens=len(tokens),
            prompt_tokens=len(tokens),
            position=position,
            tokens_per_block=self.tokens_per_block,
        )
        manager.count_branch(branch.choice)
        return branch.tokens or None

    @override
    def count_snapshots_asked(self, points: int) -> None:
        for _ in range(points):
            self._manager.count_snapshot_asked()

    @override
    def release(self, lease: TransferLease) -> None:
        lease.release()

    @override
    def quarantine(self, lease: TransferLease) -> None:
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
    def totals(self) -> CacheTotals:
        counters = self._manager.counters
        return CacheTotals(
            evicted_pages=counters.pages_evicted,
            demoted_pages=counters.pages_demoted,
            onboarded_pages=counters.pages_onboarded,
        )

    @override
    def report(self, now_ms: int) -> str | None:
        return self._report.line(self._manager.counters, now_ms)

    @override
    def run_step(self, step: int, slices: Values[Slice], rows: StepRows) -> None:
        """Nobody else has to compute it."""

    @override
    def end_step(self, step: int) -> None:
        """Nobody else has to wait for it."""

    @override
    def flush(self) -> None:
        """Nobody else has to hear of it."""
