"""Carries admission and step plans out against the real pages.

The plan counts slots; the manager has the last word. Where it refuses, the youngest running
sequence gives its pages up, never an older one for a younger, and never for pages that would stay
empty: only a chunk of the very next step may take them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker.context import ContextRole
from worker.desk import Desk, Ending
from worker.generation import GenerationRole
from worker.ports import Slice
from worker.requests import LegRecord, Sequence, SequenceState
from worker.role import Role
from worker.scheduler import (
    PROMISES,
    Admission,
    Demotion,
    Item,
    Limits,
    StepPlan,
    plan_admission,
    plan_step,
)
from worker.survey import LEG_PHASES, RECEIVING, Survey

UNKNOWN: Final = np.zeros(1, dtype=np.int32)
"""In place of a token that is being drawn."""


@dataclass(frozen=True, eq=False, slots=True)
class PageBoard:
    """Gives pages to sequences and legs, and takes them back."""

    desk: Desk
    context: ContextRole
    generation: GenerationRole
    survey: Survey
    max_batch_tokens: int
    max_running: int
    demotion: Demotion | None

    def admit(self) -> bool:
        """Give pages, and promises of pages, to whoever is next. True when somebody got
        something.
        """
        if self.survey.running_rows() >= self.max_running:
            return False  # everybody needs a row
        items = self.survey.items()
        if not items:
            return False
        plan = self._plan(items)
        if plan.short_of_slots is not None:
            shared = self.survey.share(items, plan.short_of_slots)
            plan = plan if shared is None else self._plan(shared)
        if plan.is_empty:
            return self._end_if_stuck(plan)
        legs = {leg.arrival: leg for leg in self.desk.legs if leg.state in LEG_PHASES}
        return self._carry_out(plan, legs) or self._end_if_stuck(plan)

    def _carry_out(self, plan: Admission, legs: dict[int, LegRecord]) -> bool:
        sequences = self.desk.sequences
        moved = False
        for key, slots in plan.passed:
            waiting = sequences[key] if key > 0 else legs[-key]
            waiting.passed_slots += slots
        for key in plan.resume:
            self._resume(sequences[key])  # counts as progress once it computes something
        for key in plan.land:
            moved |= self._role(legs[-key]).land(legs[-key])
        for key in plan.admit:
            moved |= self._open(sequences[key])
        for key in plan.grant:
            self.generation.grant(legs[-key])
            moved = True
        return moved

    def _plan(self, items: list[Item]) -> Admission:
        return plan_admission(items, self.desk.manager.available_slots(), self._limits())

    def _limits(self) -> Limits:
        total = self.desk.manager.total_slots()
        return Limits(self.max_batch_tokens, self.max_running, total, self.demotion)

    def _open(self, sequence: Sequence) -> bool:
        """Match the prefix tree, unless another sequence computes more of it just now. The logits
        of the last token are needed, so that one is always computed.
        """
        if self.survey.waits.begin(sequence):
            return False
        tokens = sequence.tokens.span(0, len(sequence.tokens))
        cache = self.desk.manager.open(sequence.leg.scope, tokens, max_match=len(tokens) - 1)
        cache.announce()
        sequence.cache = cache
        sequence.enter(SequenceState.RUNNING)
        self._role(sequence.leg).opened(sequence)
        return True

    def _resume(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        if sequence.cache.resume():
            sequence.enter(SequenceState.RUNNING)

    def _suspend(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self.desk.commit(sequence)
        sequence.cache.suspend()
        sequence.enter(SequenceState.SUSPENDED)
        self.desk.counters.preemptions += 1

    def _role(self, leg: LegRecord) -> Role:
        return self.context if leg.kind == "context" else self.generation

    def step_ahead(self) -> list[tuple[Sequence, Slice]]:
        """The next step, while one is under way. Empty where it would have to take pages from
        somebody: that waits until nobody's pages are touched.
        """
        rows = self.survey.rows()
        if not rows:
            return []
        plan = plan_step(rows, self._limits())
        chunks = [(self.desk.sequences[chunk.key], chunk.tokens) for chunk in plan.chunks]
        if not all(
            self._has_pages(sequence, tokens) or self._grow(sequence, tokens, [])
            for sequence, tokens in chunks
        ):
            return []
        self._count_demoted(plan)
        return [(sequence, self._slice(sequence, tokens)) for sequence, tokens in chunks]

    def step(self) -> list[tuple[Sequence, Slice]]:
        """Choose the chunks of the next step and get their pages, while none is under way."""
        rows = self.survey.rows()
        if not rows:
            return []
        plan = plan_step(rows, self._limits())
        self._count_demoted(plan)
        batch = self._allocate(plan)
        if not batch:
            self._check_progress(plan)
        return [(sequence, self._slice(sequence, tokens)) for sequence, tokens in batch]

    def _count_demoted(self, plan: StepPlan) -> None:
        for key in plan.demoted:
            self.desk.sequences[key].demoted_steps += 1

    def _allocate(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        victims = list(plan.victims)
        batch: list[tuple[Sequence, int]] = []
        for chunk in plan.chunks:
            sequence = self.desk.sequences[chunk.key]
            if sequence.state is not SequenceState.RUNNING:
                continue
            if self._has_pages(sequence, chunk.tokens) or self._grow(
                sequence, chunk.tokens, victims
            ):
                batch.append((sequence, chunk.tokens))
        if len(victims) == len(plan.victims):
            return batch  # nobody was suspended for another
        return [pair for pair in batch if pair[0].state is SequenceState.RUNNING]

    def _has_pages(self, sequence: Sequence, tokens: int) -> bool:
        cache = sequence.cache
        return cache is not None and sequence.next_position + tokens <= cache.capacity

    def _grow(self, sequence: Sequence, tokens: int, victims: list[int]) -> bool:
        """Pages for the next ``tokens`` tokens, if need be those of younger sequences."""
        assert sequence.cache is not None
        # Whole blocks, so that the manager is asked once a block and not once a token.
        block = self.desk.demand.tokens_per_block
        capacity = self.desk.demand.blocks(sequence.next_position + tokens) * block
        while not sequence.cache.grow(capacity):
            while victims and self._gone(victims[0]):
                victims.pop(0)
            if not victims:
                return False
            victim = self.desk.sequences[victims[0]]
            if victim is sequence and self._alone(sequence):
                return False  # whoever holds the pages is a transfer; they come back when it ends
            victims.pop(0)
            self._suspend(victim)
            if victim is sequence:
                return False
        return True

    def _gone(self, key: int) -> bool:
        sequence = self.desk.sequences.get(key)
        return sequence is None or sequence.state is not SequenceState.RUNNING

    def _alone(self, sequence: Sequence) -> bool:
        return all(
            other is sequence or other.state is not SequenceState.RUNNING
            for other in self.desk.sequences.values()
        )

    def _check_progress(self, plan: StepPlan) -> None:
        """Pages that nobody will give back cannot be waited for: end the request that needs
        them.
        """
        for chunk in plan.chunks:
            sequence = self.desk.sequences.get(chunk.key)
            if sequence is not None and self._alone(sequence) and not self._pages_may_come():
                self._give_up(sequence)

    def _end_if_stuck(self, plan: Admission) -> bool:
        """Nobody computes and nothing comes home, but the oldest sequence finds no pages: end its
        request.
        """
        key = plan.resume[0] if plan.resume else plan.short_of_slots
        sequence = None if key is None else self.desk.sequences.get(key)
        if sequence is None or self.survey.running_rows() or self._pages_may_come():
            return False
        if any(LEG_PHASES.get(leg.state) in PROMISES for leg in self.desk.legs):
            return False  # its room may be promised, and the peer will call for it
        self._give_up(sequence)
        return True

    def _pages_may_come(self) -> bool:
        """Whether a transfer holds pages, or a step those of a finished sequence."""
        return bool(self.desk.leases.outstanding or self.desk.departing) or any(
            leg.state in RECEIVING for leg in self.desk.legs
        )

    def _give_up(self, sequence: Sequence) -> None:
        ending = Ending("failed", "out_of_pages", self._explain(sequence), retryable=True)
        self.desk.end(sequence.leg, ending)

    def _explain(self, sequence: Sequence) -> str:
        manager, demand = self.desk.manager, self.desk.demand
        tokens = len(sequence.tokens) + demand.tokens_per_block
        states = [other.state for other in self.desk.sequences.values()]
        return (
            f"the pages of this worker cannot hold the sequence even alone: {tokens} tokens, a "
            f"block to grow into among them, take {demand.peak(tokens)} slots by pool group, "
            f"{manager.available_slots()} of {manager.total_slots()} can be had, "
            f"{self.desk.leases.quarantined_blocks} blocks are in quarantine; "
            f"{states.count(SequenceState.SUSPENDED)} sequences are suspended and "
            f"{states.count(SequenceState.QUEUED)} queued; send it to a worker with more free "
            "blocks, or give this one more memory"
        )

    def _slice(self, sequence: Sequence, tokens: int) -> Slice:
        cache, known = sequence.cache, sequence.tokens
        assert cache is not None
        start = cache.history + sequence.under_way
        end, length = start + tokens, len(known)
        draws = self.desk.draws(sequence) if end == length + sequence.draws_under_way else ()
        tables = cache.block_tables()
        if end > length:
            return Slice(cache.name, UNKNOWN, start, tables, draws, sequence.feed)
        return Slice(cache.name, known.span(start, end), start, tables, draws)
