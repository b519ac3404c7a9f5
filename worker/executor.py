"""Model and sampler behind the engine's executor port. The only engine file that touches torch.

When ``execute`` returns, keys and values of every slice are in the pages' memory, so that they may
be sent: drawing tokens waits for the device anyway, and a step without draws waits explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from worker.following import Partner
from worker.model.runner import ModelRunner, SequenceSlice
from worker.ports import Draw, Drawn, EndedStep, Executor, RowFailed, Slice, SliceResult
from worker.sampling import Sampled, SampleRow, SamplingFailed, sample


class ModelExecutor(Executor, Partner):
    """Runs steps on one rank's model. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    @property
    @override
    def depth(self) -> int:
        return 1

    @override
    def launch(self, slices: Sequence[Slice]) -> EndedStep:
        return EndedStep(self._results(slices))

    def _results(self, slices: Sequence[Slice]) -> list[SliceResult]:
        logits = self._forward(slices, [bool(part.draws) for part in slices])
        drawing = [part for part in slices if part.draws]
        rows = [_row(draw) for part in drawing for draw in part.draws]
        if not rows:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            return [() for _ in slices]
        if len(rows) != len(drawing):
            # Several choices are drawn from one row of logits.
            index = [row for row, part in enumerate(drawing) for _ in part.draws]
            logits = logits[torch.tensor(index, device=logits.device)]
        sampled = iter(sample(logits, rows))
        return [_result([next(sampled) for _ in part.draws]) for part in slices]

    @override
    def compute(self, slices: Sequence[Slice], drawing: Sequence[bool]) -> None:
        self._forward(slices, drawing)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _forward(self, slices: Sequence[Slice], drawing: Sequence[bool]) -> torch.Tensor:
        return self._runner.forward(
            [
                SequenceSlice(
                    tokens=part.tokens,
                    start=part.start,
                    block_tables=part.block_tables,
                    wants_logits=draws,
                )
                for part, draws in zip(slices, drawing, strict=True)
            ]
        )


def _row(draw: Draw) -> SampleRow:
    return SampleRow(
        params=draw.params,
        choice=draw.choice,
        output_index=draw.output_index,
        prompt_tokens=draw.prompt_tokens,
        output_tokens=draw.output_tokens,
        banned=draw.banned,
    )


def _result(sampled: Sequence[Sampled | SamplingFailed]) -> SliceResult:
    drawn: list[Drawn] = []
    for one in sampled:
        if isinstance(one, SamplingFailed):
            return RowFailed(one.reason)
        drawn.append(Drawn(one.token, one.logprob))
    return tuple(drawn)
