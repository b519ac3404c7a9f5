"""Draws of one step as work on a device: the host gives it out, and hears of the results later.

The tokens stay on the device for the step behind. Everything that the host is told comes in one
vector; it asks for that when it has nothing better to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.ports import Draw
from worker.sampling.batched import draw_group, group_rows
from worker.sampling.penalties import changes_of, processed
from worker.sampling.rows import (
    Sampled,
    SampleResult,
    SamplingFailed,
    reason_of,
    reason_of_changed,
)
from worker.token_runs import TokenLogprob
from worker.upload import upload


@dataclass(frozen=True)
class QueuedDraws:
    """``tokens`` int64 ``[rows]`` on the device: ids of the vocabulary even where no draw is
    possible.
    """

    tokens: torch.Tensor
    _told: torch.Tensor
    _sizes: tuple[int, ...]
    _event: torch.cuda.Event | None
    _changed: tuple[int, ...]
    _logprobs: tuple[tuple[int, int], ...]
    """Rows that want log-probabilities, and of how many alternatives."""

    def results(self) -> list[SampleResult]:
        """One a row. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        tokens, largest, changed, allowed, own, best, ids = _split(self._told.numpy(), self._sizes)
        failed = {
            row: reason_of(value)
            for row, value in enumerate(_floats(largest))
            if not math.isfinite(value)
        }
        for row, value, some in zip(self._changed, _floats(changed), allowed.tolist(), strict=True):
            if row not in failed and not math.isfinite(value):
                failed[row] = reason_of_changed(value) if some else "every token is banned"
        logprobs = self._told_logprobs(_floats(own), best, ids)
        return [
            SamplingFailed(failed[row]) if row in failed else Sampled(token, logprobs.get(row))
            for row, token in enumerate(tokens.tolist())
        ]

    def _told_logprobs(
        self, own: Sequence[float], best: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]
    ) -> dict[int, TokenLogprob]:
        if not self._logprobs:
            return {}
        shape = (len(self._logprobs), -1)
        values, names = best.view(np.float32).reshape(shape), ids.reshape(shape)
        return {
            row: TokenLogprob(
                logprob=own[k],
                top=tuple(zip(names[k, :count].tolist(), values[k, :count].tolist(), strict=True)),
            )
            for k, (row, count) in enumerate(self._logprobs)
        }


@torch.inference_mode()
def queue_draws(logits: torch.Tensor, rows: Sequence[Draw]) -> QueuedDraws:
    """Draw one token a row of float32 ``[rows, vocab]``, which is read before anything that is
    queued later, and not changed.
    """
    changed = tuple(i for i, row in enumerate(rows) if row.changes_logits)
    wanted = tuple(
        (i, count) for i, row in enumerate(rows) if (count := row.params.logprobs) is not None
    )
    groups = group_rows(rows)
    found = logits.max(dim=1)
    tokens, scores = found.indices, logits
    told: list[torch.Tensor | None] = [found.values, None, None, None, None, None]
    if changed or wanted or groups:
        by_group = [group.columns for group in groups]
        changes = changes_of([rows[i] for i in changed]) if changed else []
        indices = [np.array(of, np.int64) for of in (changed, [i for i, _ in wanted])]
        flat = [*indices, *changes, *(column for columns in by_group for column in columns)]
        there = iter(upload(flat, logits.device))
        changed_rows, wanted_rows = next(there), next(there)
        cells = [next(there) for _ in changes]
        if changed:
            picked = logits.index_select(0, changed_rows)
            altered = processed(picked, cells)
            best = altered.max(dim=1)
            tokens = tokens.index_copy(0, changed_rows, best.indices)
            told[1:3] = [best.values, _allowed(picked, cells)]
            if groups:
                scores = logits.index_copy(0, changed_rows, altered)
        for group, columns in zip(groups, by_group, strict=True):
            own = [next(there) for _ in columns]
            drawn = draw_group(scores.index_select(0, own[0]), group, own)
            tokens = tokens.index_copy(0, own[0], drawn)
        if wanted:
            told[3:] = _logprobs(logits, tokens, wanted_rows, wanted)
    parts = [part.reshape(-1).view(torch.int32) for part in told if part is not None]
    vector, event = _sent_back(torch.cat([tokens.int(), *parts]))
    sizes = (len(rows), *(0 if part is None else part.numel() for part in told))
    return QueuedDraws(tokens, vector, sizes, event, changed, wanted)


def _allowed(picked: torch.Tensor, cells: Sequence[torch.Tensor]) -> torch.Tensor:
    """int32 ``[rows]``: whether a row has a finite logit of a token that is not banned."""
    finite = picked.isfinite()
    finite.index_put_((cells[3], cells[4]), torch.zeros((), dtype=torch.bool, device=picked.device))
    return finite.any(dim=1).int()


def _logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    wanted: Sequence[tuple[int, int]],
) -> list[torch.Tensor]:
    """Of the model's own distribution: the drawn tokens', then values and ids of the best."""
    picked = logits.index_select(0, rows)
    log_mass = picked.logsumexp(1, keepdim=True)
    own = picked.gather(1, tokens.index_select(0, rows).unsqueeze(1)) - log_mass
    most = min(max(count for _, count in wanted), logits.shape[1])
    best, ids = picked.topk(most, dim=1)
    return [own, best - log_mass, ids.int()]


def _sent_back(vector: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if vector.device.type != "cuda":
        return vector.cpu(), None
    told = torch.empty(len(vector), dtype=torch.int32, pin_memory=True)
    told.copy_(vector, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(vector.device))
    return told, event


def _split(vector: npt.NDArray[np.int32], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.int32]]:
    begin = 0
    for size in sizes:
        yield vector[begin : begin + size]
        begin += size


def _floats(part: npt.NDArray[np.int32]) -> list[float]:
    values: list[float] = part.view(np.float32).tolist()
    return values
