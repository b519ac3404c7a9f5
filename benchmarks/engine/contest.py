"""Sides that take turns at the same figure, so that a slow minute of the machine hits each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.engine.figures import Figures
from benchmarks.engine.selection import Budget, Selection

PATIENCE_S: Final = 10.0
"""A side that has used as much for one figure takes part in no further round."""
REST_S: Final = 0.5
"""Before each sample on a device, of every engine: at the limit of its power a device is some
percent slower for whatever comes next, and one side's heat would count as the next one's.
"""
Sample = Callable[[], float]
"""Measures once."""


@dataclass(frozen=True)
class Entrant:
    """``ready`` prepares and warms up when entered, gives the sample, and frees at its end."""

    side: str
    key: str
    ready: Callable[[], AbstractContextManager[Sample]]


class _Turn:
    """One entrant under way."""

    def __init__(self, entrant: Entrant, sample: Sample, rest_s: float) -> None:
        self.entrant = entrant
        self._rest_s = rest_s
        self.samples: list[float] = []
        self._sample = sample
        self._spent_s = 0.0

    @property
    def is_patient(self) -> bool:
        return self._spent_s < PATIENCE_S

    def take(self) -> None:
        time.sleep(self._rest_s)
        began = time.perf_counter()
        self.samples.append(self._sample())
        self._spent_s += time.perf_counter() - began


class Contest:
    """Measures entrants round by round into ``figures``; one that fails leaves the others alone.
    ``rest_s`` goes before every sample.
    """

    def __init__(
        self,
        figures: Figures,
        selection: Selection,
        budget: Budget,
        rounds: int,
        rest_s: float,
    ) -> None:
        self._figures = figures
        self._selection = selection
        self._budget = budget
        self._rounds = rounds
        self._rest_s = rest_s

    def run(self, entrants: Sequence[Entrant]) -> None:
        """One figure of each entrant that is asked for: the median over rounds."""
        with ExitStack() as stack:
            turns = [
                turn
                for entrant in entrants
                if self._selection.has(entrant.side, entrant.key)
                for turn in self._prepared(entrant, stack)
            ]
            for number in range(self._rounds):
                for turn in list(turns):
                    if (number == 0 or turn.is_patient) and not self._took(turn):
                        turns.remove(turn)
            for turn in turns:
                side, key = turn.entrant.side, turn.entrant.key
                self._figures.add(side, key, statistics.median(turn.samples))

    def _prepared(self, entrant: Entrant, stack: ExitStack) -> Sequence[_Turn]:
        if self._budget.left_s() <= 0:
            self._figures.lacks(entrant.side, [entrant.key], self._budget.reason)
            return ()
        try:
            return (_Turn(entrant, stack.enter_context(entrant.ready()), self._rest_s),)
        except Exception as error:  # noqa: BLE001  # reported, and the other parts are worth having
            self._figures.failed(entrant.side, [entrant.key], error)
            return ()

    def _took(self, turn: _Turn) -> bool:
        try:
            turn.take()
        except Exception as error:  # noqa: BLE001  # as above
            self._figures.failed(turn.entrant.side, [turn.entrant.key], error)
            return False
        return True
