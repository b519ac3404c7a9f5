"""Everything of an engine that one dp group has for itself: legs, sequences, pages, transfers.

Without attention data parallelism an engine has one. With it each rank is a group, of whose pages
the leader keeps the books: what one group does is never another's business, except that all compute
in the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transfer.identity import Incarnation
from worker.admission import Bounds
from worker.chunks import ChunkRules
from worker.context import ContextRole
from worker.counters import Counters
from worker.demand import PageDemand
from worker.desk import Desk
from worker.generation import GenerationRole
from worker.intake import Intake
from worker.leases import LeaseBook
from worker.outbox import Outbox
from worker.pages import PageBoard
from worker.ports import Agreement, CacheManager, Clock, Slice, Transfers
from worker.prefix_waits import PrefixWaits
from worker.prefixes import PullLimits
from worker.requests import LegRecord, Sequence
from worker.role import Role
from worker.scheduler import Demotion
from worker.served_pulls import ServedPulls
from worker.survey import Survey


@dataclass(frozen=True, eq=False, slots=True)
class GroupParts:
    """Where the pages of a group are."""

    manager: CacheManager
    transfers: Transfers
    agreement: Agreement


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """What all groups of an engine have in common."""

    clock: Clock
    demand: PageDemand
    outbox: Outbox
    counters: Counters


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bounds of a group's requests and of its part of a step."""

    incarnation: Incarnation
    max_sequence_tokens: int
    vocab_size: int
    max_batch_tokens: int
    max_running: int
    pulls: PullLimits
    demotion: Demotion | None
    state_alignment_tokens: int | None


@dataclass(frozen=True, eq=False, slots=True)
class DpGroup:
    """Used by the engine thread."""

    number: int
    desk: Desk
    intake: Intake
    board: PageBoard
    agreement: Agreement

    def step(self) -> list[tuple[Sequence, Slice]]:
        """Choose the group's part of the next step and get its pages."""
        return self._placed(self.board.step())

    def step_ahead(self) -> list[tuple[Sequence, Slice]]:
        """The same while a step is under way; empty where it would take pages from somebody."""
        return self._placed(self.board.step_ahead())

    def _placed(self, batch: list[tuple[Sequence, Slice]]) -> list[tuple[Sequence, Slice]]:
        if self.number == 0:
            return batch
        return [(sequence, part._replace(dp_rank=self.number)) for sequence, part in batch]

    def role(self, leg: LegRecord) -> Role:
        """The strategy of one of its legs."""
        return self.intake.context if leg.kind == "context" else self.intake.generation


def make_group(number: int, parts: GroupParts, shared: Shared, limits: GroupLimits) -> DpGroup:
    """A group without any requests."""
    desk = Desk(
        manager=parts.manager,
        transfers=parts.transfers,
        clock=shared.clock,
        demand=shared.demand,
        leases=LeaseBook(parts.manager),
        outbox=shared.outbox,
        counters=shared.counters,
    )
    context = ContextRole(desk, limits.pulls)
    generation = GenerationRole(desk, limits.vocab_size)
    bounds = Bounds(limits.max_sequence_tokens, limits.vocab_size, limits.max_running)
    board = PageBoard(
        desk,
        context,
        generation,
        Survey(
            desk,
            PrefixWaits(desk, limits.max_batch_tokens),
            limits.demotion,
            limits.incarnation,
        ),
        limits.max_batch_tokens,
        limits.max_running,
        limits.demotion,
        ChunkRules(shared.demand.tokens_per_block, limits.state_alignment_tokens),
    )
    intake = Intake(desk, context, generation, ServedPulls(desk, limits.pulls), bounds)
    return DpGroup(number, desk, intake, board, parts.agreement)


def earliest(times: Iterable[int | None]) -> int | None:
    """The first of the times that there are."""
    return min((time for time in times if time is not None), default=None)
