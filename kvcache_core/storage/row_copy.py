"""Copies of many slots between two pools in few operations.

A run, that is slots that follow each other on both sides, is one slice copy without staging. Where
runs are short, rows are gathered and scattered in chunks of at most STAGING_BYTES. Between devices
the caller synchronises the stream afterwards; nothing here waits except where the host itself has
to read what a device sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kvcache_core.ports import SlotArray

STAGING_BYTES = 32 << 20
RUN_BYTES = 64 << 10
"""Runs at least this long on average are copied one by one: starting a copy costs less than staging
them in host memory.
"""
DEVICE_RUN_BYTES = 8 << 20
"""The same where source and target lie on one accelerator, whose memory is so much faster."""
FEW_RUNS = 4

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """``slots`` of ``pool``, a contiguous uint8 tensor ``[num_slots, row_bytes]``."""

    pool: torch.Tensor
    slots: SlotArray

    def piece(self, start: int, end: int) -> Rows:
        """Rows ``[start, end)`` of these."""
        return Rows(self.pool, self.slots[start:end])

    @property
    def is_run(self) -> bool:
        """Whether the slots follow each other."""
        first, last, count = int(self.slots[0]), int(self.slots[-1]), len(self.slots)
        return last - first == count - 1 and (count < 3 or bool((np.diff(self.slots) == 1).all()))

    @property
    def run(self) -> torch.Tensor:
        """The rows of a run, a view."""
        first = int(self.slots[0])
        return self.pool[first : first + len(self.slots)]

    @property
    def index(self) -> torch.Tensor:
        """The slots as the index of a gather or scatter, on the pool's device; a copy."""
        return torch.tensor(self.slots, dtype=torch.int64, device=self.pool.device)


def copy_rows(source: Rows, target: Rows, transform: Transform | None = None) -> None:
    """Copy rows of one pool to another, through ``transform`` (on the device that is not the host).

    ``transform`` maps uint8 ``[n, source row bytes]`` to ``[n, target row bytes]``.
    """
    if not len(source.slots):
        return
    for start, end in _pieces(source, target, may_be_long=transform is None):
        _copy_piece(source.piece(start, end), target.piece(start, end), transform)


def run_bounds(sources: SlotArray, targets: SlotArray) -> list[int]:
    """Positions at which runs start, and the end: ``[0, ..., n]``."""
    if len(sources) == 1:
        return [0, 1]
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    return [0, *breaks.tolist(), len(sources)]


def _pieces(source: Rows, target: Rows, *, may_be_long: bool) -> Iterator[tuple[int, int]]:
    """Half-open ranges to copy one by one. Only runs that need no staging may be long."""
    count, row_bytes = len(source.slots), max(source.pool.shape[1], target.pool.shape[1])
    step = max(1, STAGING_BYTES // row_bytes)
    bounds = run_bounds(source.slots, target.slots)
    runs = len(bounds) - 1
    stays = source.pool.device == target.pool.device and source.pool.device.type != "cpu"
    worth_bytes = DEVICE_RUN_BYTES if stays else RUN_BYTES
    if runs > FEW_RUNS and count * row_bytes < runs * worth_bytes:
        bounds = [0, count]
    elif may_be_long:
        step = count
    for first, end in pairwise(bounds):
        for start in range(first, end, step):
            yield start, min(end, start + step)


def _copy_piece(source: Rows, target: Rows, transform: Transform | None) -> None:
    crosses = source.pool.device != target.pool.device
    rows = source.run if source.is_run else _gathered(source, is_sent=crosses)
    if transform is not None:
        if source.pool.device.type == "cpu":
            rows = rows.to(target.pool.device, non_blocking=True)
        rows = transform(rows)
    if target.is_run:
        target.run.copy_(rows, non_blocking=True)
        return
    if rows.device != target.pool.device:
        rows = _moved(rows, target.pool.device)
    index = target.index
    _words(target.pool).index_copy_(0, index, _words(rows))


def _gathered(rows: Rows, *, is_sent: bool) -> torch.Tensor:
    """The rows in one new tensor on the same device; pinned when a device reads it from here."""
    index = rows.index
    pool = _words(rows.pool)
    if not is_sent or rows.pool.device.type != "cpu":
        return pool.index_select(0, index).view(torch.uint8)
    buffer = torch.empty((len(index), pool.shape[1]), dtype=torch.int64, pin_memory=True)
    return torch.index_select(pool, 0, index, out=buffer).view(torch.uint8)


def _moved(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The rows on another device; complete when the host is to read them."""
    if device.type != "cpu":
        return rows.to(device, non_blocking=True)
    buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    buffer.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return buffer


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as the widest integers that fit into a row: gathers move words, not bytes."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
