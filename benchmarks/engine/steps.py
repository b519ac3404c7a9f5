"""What is told of a run by when its steps' tokens came out: the same of every engine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.engine.workloads import Load


@dataclass(frozen=True)
class Step:
    """``tokens`` came out together at ``ended_s``: one of each sequence that took part."""

    ended_s: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """``load``, asked for at ``began_s``; its ``steps`` with tokens, in order."""

    load: Load
    began_s: float
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return sum(step.tokens for step in self.steps)

    def decode_tok_s(self) -> float:
        """Of one sequence, after its first token."""
        return (len(self.steps) - 1) / (self.steps[-1].ended_s - self.steps[0].ended_s)

    def first_step_ms(self) -> float:
        """From the request to the first token."""
        return (self.steps[0].ended_s - self.began_s) * 1e3

    def whole_step_ms(self) -> float:
        """Median of the steps that gave every sequence a token, as did the step before.

        Raises:
            RuntimeError: there are no two such steps.
        """
        apart = [
            after.ended_s - before.ended_s
            for before, after in pairwise(self.steps)
            if before.tokens == after.tokens == self.load.requests
        ]
        if not apart:
            raise RuntimeError(
                f"expected two steps of all {self.load.requests} sequences, got "
                f"{[step.tokens for step in self.steps]}"
            )
        return statistics.median(apart) * 1e3

    def tok_s(self) -> float:
        """Output tokens a second, from the requests to the last token."""
        return self.tokens / (self.steps[-1].ended_s - self.began_s)
