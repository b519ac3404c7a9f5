"""Steps that were launched and whose results were not taken, oldest first.

A sequence in a step keeps every page that the step touches until its results are taken: it is not
suspended, and when it finishes its pages stay behind in ``Desk.departing``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Values
from dataclasses import dataclass

from worker.desk import Desk
from worker.ports import Executor, LaunchedStep, RowFailed, Slice, SliceResult
from worker.requests import Sequence, SequenceState

Batch = Values[tuple[Sequence, Slice]]


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    number: int
    launched: LaunchedStep
    batch: Batch
    looks_back: bool
    """Whether the next draw of some sequence depends on the token that this step draws."""


class StepsUnderWay:
    """Owner of what sequences know about steps under way."""

    def __init__(self, desks: Values[Desk], executor: Executor) -> None:
        """``desks`` by dp group."""
        self._desks = desks
        self._executor = executor
        self._goes_ahead = executor.depth > 1
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def can_go_ahead(self) -> bool:
        """Whether a step may follow before results are seen."""
        return not any(step.looks_back for step in self._steps)

    def launch(self, number: int, batch: Batch) -> None:
        """Begin the step of this number."""
        launched = self._executor.launch([part for _, part in batch])
        for sequence, part in batch:
            sequence.last_step = number
            sequence.under_way += len(part.tokens)
            if part.draws:
                sequence.draws_under_way += 1
        looks_back = self._goes_ahead and self._name_draws(batch)
        self._steps.append(_Step(number, launched, batch, looks_back))

    @staticmethod
    def _name_draws(batch: Batch) -> bool:
        """Say which sequences can go on from their draws: those that nothing but a stop token or a
        message ends with it, and that it makes no others of. True when one of them looks back.
        """
        looks_back, number = False, 0
        for sequence, part in batch:
            sequence.feed, leg = None, sequence.leg
            draws = part.draws
            ends = leg.kind == "context" or len(draws) != 1
            if not ends and draws[0].output_index + 1 < leg.output_limit:
                sequence.feed = number
                looks_back = looks_back or leg.sampling.looks_back
            number += len(draws)
        return looks_back

    def take(self) -> list[tuple[Sequence, Slice, SliceResult]]:
        """Wait for the oldest step."""
        step = self._steps.popleft()
        results = step.launched.wait()
        for desk in self._desks:
            desk.manager.end_step(step.number)
        for sequence, part in step.batch:
            sequence.under_way -= len(part.tokens)
            if part.draws:
                sequence.draws_under_way -= 1
        found = [
            (sequence, part, result)
            for (sequence, part), result in zip(step.batch, results, strict=True)
        ]
        for sequence, part, result in found:
            if sequence.state is SequenceState.FINISHED:
                self._keep(sequence, part, result)
                self._desks[part.dp_rank].touched(sequence)
            elif sequence.rebased is not None:
                self._desks[part.dp_rank].touched(sequence)
        return found

    @staticmethod
    def _keep(sequence: Sequence, part: Slice, result: SliceResult) -> None:
        """What was computed of a sequence that has finished since is as good as any, unless it
        was computed from a token that nobody asked for.
        """
        if sequence.cache is not None and part.feed is None and not isinstance(result, RowFailed):
            sequence.cache.advance(part.start + len(part.tokens))
