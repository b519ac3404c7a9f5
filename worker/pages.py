"""Carries admission and step plans out against the real pages.

The plan counts slots; the manager has the last word. Where it refuses, the youngest running
sequence gives its pages up, never an older one for a younger, and never for pages that would stay
empty: only a chunk of the very next step may take them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from worker.chunks import ChunkRules
from worker.context import ContextRole
from worker.desk import Desk, Ending
from worker.generation import GenerationRole
from worker.ports import CacheSequence, Slice, StateSnapshot
from worker.requests import LegRecord, Sequence, SequenceState
from worker.role import Role
from worker.scheduler import (
    PROMISES,
    Admission,
    Chunk,
    Demotion,
    Item,
    Limits,
    StepPlan,
    Verdict,
    plan_admission,
    plan_step,
)
from worker.survey import LEG_PHASES, RECEIVING, Survey

UNKNOWN: Final = np.zeros(1, dtype=np.int32)
"""In place of a token that is being drawn."""


class Opening(Enum):
    """What became of a queued sequence whose turn it was."""

    STARTED = "started"
    WAITS = "waits"
    """For a prefix that another one computes."""
    DEFERRED = "deferred"
    """It lacks more than was expected when it was ordered."""


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
    chunks: ChunkRules

    def admit(self) -> bool:
        """Give pages, and promises of pages, to whoever is next. True when somebody got
        something.
        """
        if self.survey.running_rows() >= self.max_running:
            return False  # everybody needs a row
        given_way: set[int] = set()
        moved, deferred = self._pass(given_way)
        if deferred:
            # What they claimed is free for those who found no room; then they are matched again.
            given_way |= deferred
            moved |= self._pass(given_way)[0]
        for key in given_way:
            sequence = self.desk.sequences.get(key)
            if sequence is not None and sequence.state is SequenceState.QUEUED:
                sequence.demoted_steps += 1
        return moved

    def _pass(self, given_way: set[int]) -> tuple[bool, set[int]]:
        """One plan: whether somebody got something, and who was deferred. Who had to come after
        younger ones is added to ``given_way``.
        """
        items = self.survey.items()
        if not items:
            return False, set()
        plan = self._plan(items)
        if plan.short_of_slots is not None:
            shared = self.survey.share(items, plan.short_of_slots)
            plan = plan if shared is None else self._plan(shared)
        given_way.update(plan.demoted)
        if plan.is_empty:
            if not plan.demoted:
                self.survey.refused()  # demoted prompts age by it
            return self._end_if_stuck(plan), set()
        legs = {leg.arrival: leg for leg in self.desk.legs if leg.state in LEG_PHASES}
        moved, deferred = self._carry_out(plan, legs)
        return moved or bool(deferred) or self._end_if_stuck(plan), deferred

    def _carry_out(self, plan: Admission, legs: dict[int, LegRecord]) -> tuple[bool, set[int]]:
        sequences = self.desk.sequences
        moved = False
        deferred: set[int] = set()
        for key, slots in plan.passed:
            waiting = sequences[key] if key > 0 else legs[-key]
            waiting.passed_slots += slots
        for key in plan.resume:
            self._resume(sequences[key])  # counts as progress once it computes something
        for key in plan.land:
            moved |= self._role(legs[-key]).land(legs[-key])
        for key in plan.admit:
            opening = self._open(sequences[key])
            moved |= opening is Opening.STARTED
            if opening is Opening.DEFERRED:
                deferred.add(key)
        for key in plan.grant:
            self.generation.grant(legs[-key])
            moved = True
        return moved, deferred

    def _plan(self, items: list[Item]) -> Admission:
        return plan_admission(items, self.desk.manager.available_slots(), self._limits())

    def _limits(self) -> Limits:
        total = self.desk.manager.total_slots()
        return Limits(self.max_batch_tokens, self.max_running, total, self.demotion, self.chunks)

    def _open(self, sequence: Sequence) -> Opening:
        """Match the prefix tree, unless another sequence computes more of it just now. The logits
        of the last token are needed, so that one is always computed.
        """
        if self.survey.waits.begin(sequence):
            return Opening.WAITS
        tokens = sequence.tokens.span(0, len(sequence.tokens))
        cache = self.desk.manager.open(sequence.leg.scope, tokens, max_match=len(tokens) - 1)
        if self._verdict(sequence, len(tokens) - cache.matched_tokens) is Verdict.DEFER:
            cache.close()
            return Opening.DEFERRED
        cache.announce()
        sequence.cache = cache
        sequence.enter(SequenceState.RUNNING)
        if self.desk.manager.keeps_states:
            self._ask_for_states(sequence, cache)
        self._role(sequence.leg).opened(sequence)
        return Opening.STARTED

    def _ask_for_states(self, sequence: Sequence, cache: CacheSequence) -> None:
        """States are worth keeping where the prompt leaves all known ones, and where it ends if the
        sequence goes on after it: what rests is kept as it is.
        """
        leg, manager = sequence.leg, self.desk.manager
        points: set[int] = set()
        branch = manager.branch_point(leg.scope, leg.prompt, cache.history)
        if branch is not None:
            points.add(branch)
        if leg.kind == "generation" and cache.history < leg.prompt_tokens:
            points.add(leg.prompt_tokens)
        sequence.snapshot_points = tuple(sorted(points))
        manager.count_snapshots_asked(len(points))

    def _verdict(self, sequence: Sequence, found: int) -> Verdict:
        """Whether a matched prompt may start; from now on it is known what it lacks."""
        if self.demotion is None:
            return Verdict.START
        expected = self.survey.expected_tokens(sequence)
        sequence.uncached_tokens = found
        return self.demotion.verdict(expected=expected, found=found, demoted=sequence.demoted_steps)

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
        plan = plan_step(rows, self._limits(), self.survey.ahead())
        batch = [(self.desk.sequences[chunk.key], chunk) for chunk in plan.chunks]
        if not all(
            self._has_pages(sequence, chunk.tokens) or self._grow(sequence, chunk.tokens, [])
            for sequence, chunk in batch
        ):
            return []
        self._count_demoted(plan)
        return [(sequence, self._slice(sequence, chunk)) for sequence, chunk in batch]

    def step(self) -> list[tuple[Sequence, Slice]]:
        """Choose the chunks of the next step and get their pages, while none is under way."""
        rows = self.survey.rows()
        if not rows:
            return []
        plan = plan_step(rows, self._limits(), self.survey.ahead())
        self._count_demoted(plan)
        batch = self._allocate(plan)
        if not batch:
            self._check_progress(plan)
        return [(sequence, self._slice(sequence, chunk)) for sequence, chunk in batch]

    def _count_demoted(self, plan: StepPlan) -> None:
        for key in plan.demoted:
            self.desk.sequences[key].demoted_steps += 1

    def _allocate(self, plan: StepPlan) -> list[tuple[Sequence, Chunk]]:
        victims = list(plan.victims)
        batch: list[tuple[Sequence, Chunk]] = []
        for chunk in plan.chunks:
            sequence = self.desk.sequences[chunk.key]
            if sequence.state is not SequenceState.RUNNING:
                continue
            cache = sequence.cache
            assert cache is not None
            if cache.history + chunk.tokens <= cache.capacity or self._grow(
                sequence, chunk.tokens, victims
            ):
                batch.append((sequence, chunk))
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

    def _slice(self, sequence: Sequence, chunk: Chunk) -> Slice:
        cache, known = sequence.cache, sequence.tokens
        assert cache is not None
        start = cache.history + sequence.under_way
        end, length = start + chunk.tokens, known.length
        draws = self.desk.draws(sequence) if end == length + sequence.draws_under_way else ()
        if end > length:
            tables = cache.block_tables()
            return Slice(cache.name, UNKNOWN, start, tables, draws, feed=sequence.feed)
        slot = None if chunk.keep is None else cache.acquire_snapshot_slot()
        snapshot = None if chunk.keep is None or slot is None else StateSnapshot(chunk.keep, slot)
        tables = cache.block_tables()
        return Slice(cache.name, known.span(start, end), start, tables, draws, snapshot)
