"""Model and sampler behind the engine's executor port. The only engine file that touches torch.

With a depth of 1 a step is over when ``launch`` returns. With 2 it is queued on the device, its
draws behind it, and the step behind goes on from the tokens where they are. Either way keys and
values are in the pages' memory once a step was waited for, so that they may be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from worker.following import Partner
from worker.model.runner import ModelRunner, SequenceSlice
from worker.ports import (
    Draw,
    Drawn,
    EndedStep,
    Executor,
    LaunchedStep,
    RowFailed,
    Slice,
    SliceResult,
    StepRows,
)
from worker.sampling import QueuedDraws, SampleResult, SamplingFailed, queue_draws, sample
from worker.upload import upload


class RankExecutor(Executor, Partner, Protocol):
    """What a rank computes steps with, whether it leads or follows."""

    def prepare(self) -> None:
        """Have everything that steps would otherwise make when they first need it. All ranks do so
        at once.
        """

    def rehearse(self, slices: Sequence[Slice]) -> None:
        """Compute the same on all ranks at once, each in pages of its own."""


class ModelExecutor(RankExecutor):
    """Runs steps on one rank's model. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, device: torch.device, depth: int = 1) -> None:
        self._runner = runner
        self._device = device
        self._depth = depth

    @override
    def prepare(self) -> None:
        self._runner.capture_decodes()

    @property
    @override
    def depth(self) -> int:
        return self._depth

    @override
    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        logits = self._runner.forward(to_compute(slices, [bool(part.draws) for part in slices]))
        if self._depth == 1:
            return EndedStep(draw_from(logits, slices, self._device))
        logits, rows = _to_draw(logits, slices)
        if not rows:
            return _QueuedStep(slices, None, self._mark())
        draws = queue_draws(logits, rows)
        self._runner.feed.put(draws.tokens)
        return _QueuedStep(slices, draws, None)

    @override
    def begin(
        self, slices: Sequence[Slice], drawing: Sequence[bool], rows: StepRows
    ) -> Callable[[], None]:
        self._runner.forward(to_compute(slices, drawing))
        mark = self._mark()
        return nothing_left if mark is None else mark.synchronize

    @override
    def rehearse(self, slices: Sequence[Slice]) -> None:
        self.execute(slices)
        # Names of a rehearsal are not the engine's.
        self._runner.forget()

    def _mark(self) -> torch.cuda.Event | None:
        """The end of all that is queued; None where nothing ever is."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True, eq=False, slots=True)
class _QueuedStep(LaunchedStep):
    """A step on a device, by its draws or, without any, by the event at its end."""

    slices: Sequence[Slice]
    draws: QueuedDraws | None
    end: torch.cuda.Event | None

    @override
    def wait(self) -> list[SliceResult]:
        if self.end is not None:
            self.end.synchronize()
        return _results(self.slices, () if self.draws is None else self.draws.results())


def nothing_left() -> None:
    """To wait for what is over."""


def to_compute(slices: Sequence[Slice], drawing: Sequence[bool]) -> list[SequenceSlice]:
    """Slices as the model takes them."""
    return [
        SequenceSlice(
            part.tokens,
            part.start,
            part.block_tables,
            draws,
            -1 if part.feed is None else part.feed,
            part.sequence,
        )
        for part, draws in zip(slices, drawing, strict=True)
    ]


def draw_from(
    logits: torch.Tensor, slices: Sequence[Slice], device: torch.device
) -> list[SliceResult]:
    """One result a slice from the logits ``[slices that draw, vocab]`` of a step, which is over
    when this returns.
    """
    logits, rows = _to_draw(logits, slices)
    if not rows:
        wait_for(device)
    return _results(slices, sample(logits, rows) if rows else ())


def wait_for(device: torch.device) -> None:
    """Until everything that was queued there is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _to_draw(logits: torch.Tensor, slices: Sequence[Slice]) -> tuple[torch.Tensor, list[Draw]]:
    """A row of logits for each draw: several choices are drawn from one."""
    drawing = [part for part in slices if part.draws]
    rows = [draw for part in drawing for draw in part.draws]
    if len(rows) != len(drawing):
        index = np.repeat(np.arange(len(drawing)), [len(part.draws) for part in drawing])
        logits = logits[upload([index], logits.device)[0]]
    return logits, rows


def _results(slices: Sequence[Slice], sampled: Sequence[SampleResult]) -> list[SliceResult]:
    found = iter(sampled)
    return [_result(part.draws, found) for part in slices]


def _result(draws: Sequence[Draw], found: Iterator[SampleResult]) -> SliceResult:
    drawn: list[Drawn] = []
    failed: RowFailed | None = None
    for _ in draws:
        one = next(found)
        if isinstance(one, SamplingFailed):
            failed = failed or RowFailed(one.reason)
        else:
            drawn.append(Drawn(one.token, one.logprob))
    return failed or tuple(drawn)
