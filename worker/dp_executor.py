"""Steps of an instance whose ranks are dp groups: the leader draws for all of them, and each rank
computes what lives on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from worker.executor import RankExecutor, draw_from, nothing_left, to_compute, wait_for
from worker.model.dp_runner import DpRunner
from worker.ports import EndedStep, LaunchedStep, Slice, StepRows, step_rows


class DpExecutor(RankExecutor):
    """One rank's part. Owned by the engine thread, or by the thread that follows."""

    def __init__(self, runner: DpRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    @override
    def prepare(self) -> None:
        return  # nothing is captured

    @property
    @override
    def depth(self) -> int:
        return 1

    @override
    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        rows = step_rows(slices, self._runner.size)
        own = [part for part in slices if part.dp_rank == self._runner.rank]
        logits = self._forward(own, [bool(part.draws) for part in own], rows)
        return EndedStep(draw_from(logits, slices, self._device))

    @override
    def begin(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> Callable[[], None]:
        self._forward(slices, drawing, rows)
        wait_for(self._device)
        return nothing_left

    @override
    def rehearse(self, slices: Sequence[Slice]) -> None:
        of_all = [
            part._replace(dp_rank=rank) for rank in range(self._runner.size) for part in slices
        ]
        if self._runner.rank == 0:
            self.execute(of_all)
        else:
            rows = step_rows(of_all, self._runner.size)
            self.begin(slices, [bool(part.draws) for part in slices], rows)()
        # Names of a rehearsal are not the engine's.
        self._runner.forget()

    def _forward(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> torch.Tensor:
        return self._runner.forward(to_compute(slices, drawing), rows.tokens, rows.draws)
