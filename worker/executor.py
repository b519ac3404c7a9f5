"""Model and sampler behind the engine's executor port. The only engine file that touches torch.

With a depth of 1 a step is over when ``launch`` returns. With 2 it is queued on the device, its
draws behind it, and the step behind goes on from the tokens where they are. Either way keys and
values are in the pages' memory once a step was waited for, so that they may be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
)
from worker.sampling import QueuedDraws, SampleResult, SamplingFailed, queue_draws, sample
from worker.upload import upload


class ModelExecutor(Executor, Partner):
    """Runs steps on one rank's model. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, device: torch.device, depth: int = 1) -> None:
        self._runner = runner
        self._device = device
        self._depth = depth

    def prepare(self) -> None:
        """Have everything that steps would otherwise make when they first need it. All ranks do so
        at once.
        """
        self._runner.capture_decodes()

    @property
    @override
    def depth(self) -> int:
        return self._depth

    @override
    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        logits = self._forward(slices, [bool(part.draws) for part in slices])
        drawing = [part for part in slices if part.draws]
        rows = [draw for part in drawing for draw in part.draws]
        if rows and len(rows) != len(drawing):
            # Several choices are drawn from one row of logits.
            index = np.repeat(np.arange(len(drawing)), [len(part.draws) for part in drawing])
            logits = logits[upload([index], logits.device)[0]]
        if self._depth == 1:
            if not rows:
                self._synchronize()
            return EndedStep(_results(slices, sample(logits, rows) if rows else ()))
        if not rows:
            return _QueuedStep(slices, None, self._mark())
        draws = queue_draws(logits, rows)
        self._runner.feed.put(draws.tokens)
        return _QueuedStep(slices, draws, None)

    @override
    def begin(self, slices: Sequence[Slice], drawing: Sequence[bool]) -> Callable[[], None]:
        self._forward(slices, drawing)
        mark = self._mark()
        return _nothing if mark is None else mark.synchronize

    def _forward(self, slices: Sequence[Slice], drawing: Sequence[bool]) -> torch.Tensor:
        return self._runner.forward(
            [
                SequenceSlice(
                    part.tokens,
                    part.start,
                    part.block_tables,
                    draws,
                    -1 if part.feed is None else part.feed,
                )
                for part, draws in zip(slices, drawing, strict=True)
            ]
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

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


def _nothing() -> None:
    """To wait for what is over."""


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
