"""Steps that were launched and whose results were not taken, oldest first.

A sequence in a step keeps every page that the step touches until its results are taken: it is not
suspended, and when it finishes its pages stay behind in ``Desk.departing``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Values
from dataclasses import dataclass
from itertools import count

from worker.desk import Desk
from worker.ports import Executor, LaunchedStep, RowFailed, Slice, SliceResult
from worker.requests import Sequence

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

    def __init__(self, desk: Desk, executor: Executor) -> None:
        self._desk = desk
        self._executor = executor
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def can_go_ahead(self) -> bool:
        """Whether a step may follow before results are seen."""
        return not any(step.looks_back for step in self._steps)

    def launch(self, batch: Batch) -> None:
        """Begin a step of number ``Counters.steps``."""
        launched = self._executor.launch([part for _, part in batch])
        number = self._desk.counters.steps
        draws = count()
        looks_back = False
        for sequence, part in batch:
            sequence.last_step = number
            sequence.under_way += len(part.tokens)
            sequence.feed = None
            if not part.draws:
                continue
            numbers = [next(draws) for _ in part.draws]
            if sequence.may_go_on:
                sequence.feed = numbers[0]
                looks_back = looks_back or sequence.leg.sampling.looks_back
            sequence.draws_under_way += 1
        self._steps.append(_Step(number, launched, batch, looks_back))

    def take(self) -> list[tuple[Sequence, Slice, SliceResult]]:
        """Wait for the oldest step."""
        step = self._steps.popleft()
        results = step.launched.wait()
        self._desk.manager.end_step(step.number)
        for sequence, part in step.batch:
            sequence.under_way -= len(part.tokens)
            if part.draws:
                sequence.draws_under_way -= 1
        found = [
            (sequence, part, result)
            for (sequence, part), result in zip(step.batch, results, strict=True)
        ]
        for sequence, part, result in found:
            if sequence.key in self._desk.departing:
                self._keep(sequence, part, result)
            self._desk.touched(sequence)
        return found

    @staticmethod
    def _keep(sequence: Sequence, part: Slice, result: SliceResult) -> None:
        """What was computed of a sequence that has finished since is as good as any, unless it
        was computed from a token that nobody asked for.
        """
        if sequence.cache is not None and part.feed is None and not isinstance(result, RowFailed):
            sequence.cache.advance(part.start + len(part.tokens))
