"""A rank that follows a simulated worker: the real follower over a model that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from typing_extensions import override

from kvcache_core.manager import UnifiedKVCacheManager
from worker.following import Partner, RankFollower
from worker.oplog import LogEntries, StepChecksum
from worker.ports import Slice, StepRows
from worker.recording import Follower


class SimFollower(Follower, Partner):
    """Applies the log at once. Its steps must be begun and ended in order, and named draws drawn
    by the step before.
    """

    def __init__(self, manager: UnifiedKVCacheManager) -> None:
        self._told: list[StepChecksum] = []
        nobody = cast(Any, None)  # no pages travel to or from a simulated follower
        self._rank = RankFollower(manager, nobody, self, lambda said: self._hear(said))
        self._under_way: list[int] = []
        self._begun = 0
        self._drawing = 0

    def _hear(self, said: object) -> None:
        assert isinstance(said, StepChecksum)
        self._told.append(said)

    @override
    def apply(self, entries: LogEntries) -> None:
        self._rank.apply(entries)

    @override
    def checksums(self) -> list[StepChecksum]:
        told, self._told = self._told, []
        return told

    @override
    def begin(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> Callable[[], None]:
        fed = [part.feed for part in slices if part.feed is not None]
        assert not fed or (self._under_way and len(fed) <= self._drawing)
        self._drawing = sum(drawing)
        self._begun += 1
        step = self._begun
        self._under_way.append(step)
        assert len(self._under_way) <= 2

        def end() -> None:
            assert self._under_way.pop(0) == step

        return end
