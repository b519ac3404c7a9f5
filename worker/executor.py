"""Model and sampler behind the engine's executor port.

When ``execute`` returns, keys and values of every slice are in the pages' memory, so that they may
be sent: drawing tokens waits for the device anyway, and a step without draws waits explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from typing_extensions import override

from worker.following import Partner
from worker.model.runner import ModelRunner, SequenceSlice
from worker.ports import Draw, Drawn, Executor, RowFailed, Slice, SliceResult, StepRows
from worker.sampling import Sampled, SampleRow, SamplingFailed, sample


class RankExecutor(Executor, Partner, Protocol):
    """What a rank computes steps with, whether it leads or follows."""

    def rehearse(self, slices: Sequence[Slice]) -> None:
        """Compute the same on all ranks at once, each in pages of its own."""


class ModelExecutor(RankExecutor):
    """Runs steps on one rank's model. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    @override
    def execute(self, slices: Sequence[Slice]) -> list[SliceResult]:
        logits = self._runner.forward(to_compute(slices, [bool(part.draws) for part in slices]))
        return draw_from(logits, slices, self._device)

    @override
    def compute(self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows) -> None:
        self._runner.forward(to_compute(slices, drawing))
        wait_for(self._device)

    @override
    def rehearse(self, slices: Sequence[Slice]) -> None:
        self.execute(slices)


def to_compute(slices: Sequence[Slice], drawing: Sequence[bool]) -> list[SequenceSlice]:
    """Slices as the model takes them."""
    return [
        SequenceSlice(
            tokens=part.tokens,
            start=part.start,
            block_tables=part.block_tables,
            wants_logits=draws,
        )
        for part, draws in zip(slices, drawing, strict=True)
    ]


def draw_from(
    logits: torch.Tensor, slices: Sequence[Slice], device: torch.device
) -> list[SliceResult]:
    """One result a slice from the logits ``[slices that draw, vocab]`` of a step, which is over
    when this returns.
    """
    drawing = [part for part in slices if part.draws]
    rows = [_row(draw) for part in drawing for draw in part.draws]
    if not rows:
        wait_for(device)
        return [() for _ in slices]
    if len(rows) != len(drawing):
        # Several choices are drawn from one row of logits.
        index = [row for row, part in enumerate(drawing) for _ in part.draws]
        logits = logits[torch.tensor(index, device=logits.device)]
    sampled = iter(sample(logits, rows))
    return [_result([next(sampled) for _ in part.draws]) for part in slices]


def wait_for(device: torch.device) -> None:
    """Until everything that was queued there is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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
