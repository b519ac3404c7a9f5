"""Ranks of a simulated worker that have requests of their own: real followers of real logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier
from tests.support.fake_executor import FakeExecutor, FakeMemory
from tests.support.sim_network import Node, SimNetwork
from transfer.agent_events import AgentEvent
from transfer.identity import Incarnation
from worker.dp_group import GroupParts
from worker.elsewhere import ElsewhereCopied
from worker.following import GroupFollower, Partner
from worker.group_leading import GroupTransfers
from worker.inbox import RankReported
from worker.oplog import LOG_CODEC, LogEntries, StepChecksum
from worker.ports import EndedStep, Executor, LaunchedStep, Slice, StepRows
from worker.rank_facts import GroupFact
from worker.recording import Follower, LeaderManager


class Leader(Protocol):
    """The worker whose rank it is."""

    incarnation: Incarnation
    alive: bool

    def report(self, item: RankReported) -> None:
        """For the engine."""


class Idle(Partner):
    """The leader's fake executor computes for all ranks; here it is noted what should have been."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepRows]] = []

    @override
    def begin(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> Callable[[], None]:
        assert len(drawing) == len(slices)
        self.steps.append((sum(len(part.tokens) for part in slices), rows))
        return lambda: None


class SimRank(Node, Follower):
    """One rank behind the leader: pages, a follower, transfers."""

    def __init__(
        self,
        leader: Leader,
        rank: int,
        network: SimNetwork,
        pages: Callable[[PageCopier], UnifiedKVCacheManager],
        memory: FakeMemory,
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.manager = pages(memory)
        self.partner = Idle()
        self._leader = leader
        self._checksums: list[StepChecksum] = []
        self._follower = GroupFollower(self.manager, network.join(self), self.partner, self._tell)
        self.books = pages(ElsewhereCopied())
        log = LeaderManager(self.books, (self,))
        transfers = GroupTransfers(log)
        self.parts = GroupParts(log, transfers, transfers)

    @property
    @override
    def incarnation(self) -> Incarnation:  # type: ignore[override]
        return self._leader.incarnation

    @property
    @override
    def alive(self) -> bool:  # type: ignore[override]
        return self._leader.alive

    @override
    def hear(self, event: AgentEvent) -> None:
        self._follower.report(event)

    @override
    def apply(self, entries: LogEntries) -> None:
        self._follower.apply(LOG_CODEC.decode(LOG_CODEC.encode(entries)))

    @override
    def checksums(self) -> list[StepChecksum]:
        found, self._checksums = self._checksums, []
        return found

    def _tell(self, message: StepChecksum | GroupFact) -> None:
        if isinstance(message, StepChecksum):
            self._checksums.append(message)
        else:
            self._leader.report(RankReported(self.rank, message))


class DpFakeExecutor(Executor):
    """A fake model on the memories of all ranks."""

    def __init__(self, ranks: Sequence[FakeExecutor]) -> None:
        self.ranks = ranks

    @property
    @override
    def depth(self) -> int:
        return 1

    @override
    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        ranks = [part.dp_rank for part in slices]
        assert ranks == sorted(ranks)
        results = [
            result
            for rank, executor in enumerate(self.ranks)
            for result in executor.execute([part for part in slices if part.dp_rank == rank])
        ]
        return EndedStep(results)
