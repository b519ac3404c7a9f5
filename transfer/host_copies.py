"""Gather and scatter on host memory: one indexed numpy copy a part, over all blocks at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from transfer.copy_plan import CopyPlan, CopySide, Slots, Units

ROWS_WITHOUT_THE_LOCK: Final = 512
"""numpy gives up the interpreter's lock for an indexed assignment of more than 500 rows. One of a
few large rows would hold up the event loop and the transport's thread for milliseconds.
"""
LEAST_ROW_BYTES: Final = 2048
"""Rows are not cut further for that: such ones are copied as fast as larger ones."""
Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[Any]
"""Memory as opaque elements of one unit, which numpy copies whole."""


class HostCopies:
    """``PageCopies`` on numpy arrays, which must be C-contiguous."""

    def check_gather(
        self, plan: CopyPlan, pools: Sequence[Bytes], slots: Slots, message: Bytes
    ) -> None:
        """Raise ValueError for what :meth:`gather` refuses."""
        _check_message(plan, message, slots)
        _check_pools(((part.sender, part.unit_bytes) for part in plan.parts), pools, slots)

    def check_scatter(
        self, plan: CopyPlan, message: Bytes, pools: Sequence[Bytes], slots: Slots
    ) -> None:
        """Raise ValueError for what :meth:`scatter` refuses."""
        _check_message(plan, message, slots)
        _check_pools(((part.receiver, part.unit_bytes) for part in plan.parts), pools, slots)

    def gather(self, plan: CopyPlan, pools: Sequence[Bytes], slots: Slots, message: Bytes) -> None:
        """Copy the sender's runs of ``slots`` into ``message``."""
        self.check_gather(plan, pools, slots, message)
        for part, start, end in plan.part_bytes(len(slots)):
            rows = _rows(pools[part.sender.pool], part.unit_bytes)
            target = _rows(message[start:end], part.unit_bytes)
            # Slots are checked; "raise" would copy through a buffer.
            np.take(rows, part.sender.rows(slots), out=target, mode="clip")

    def scatter(self, plan: CopyPlan, message: Bytes, pools: Sequence[Bytes], slots: Slots) -> None:
        """Copy ``message`` into the receiver's runs of ``slots``."""
        self.check_scatter(plan, message, pools, slots)
        for part, start, end in plan.part_bytes(len(slots)):
            targets = part.receiver.rows(slots)
            pieces = row_pieces(len(targets), part.unit_bytes)
            rows = _rows(pools[part.receiver.pool], part.unit_bytes // pieces)
            rows[_cut(targets, pieces)] = _rows(message[start:end], part.unit_bytes // pieces)


def row_pieces(rows: int, row_bytes: int) -> int:
    """In how many pieces each of ``rows`` rows is assigned, a power of two that divides it."""
    pieces = 1
    while (
        rows * pieces < ROWS_WITHOUT_THE_LOCK
        and not row_bytes % (2 * pieces)
        and row_bytes // (2 * pieces) >= LEAST_ROW_BYTES
    ):
        pieces *= 2
    return pieces


def _cut(rows: Units, pieces: int) -> Units:
    """Indexes of the pieces of rows."""
    return (rows[:, np.newaxis] * pieces + np.arange(pieces)).reshape(-1)


def _rows(memory: Bytes, unit_bytes: int) -> Rows:
    return memory.reshape(-1).view(np.dtype((np.void, unit_bytes)))


def _check_message(plan: CopyPlan, message: Bytes, slots: Slots) -> None:
    size = len(slots) * plan.block_bytes
    if message.shape != (size,) or not message.flags.c_contiguous:
        raise ValueError(
            f"message of {len(slots)} blocks: expected {size} contiguous bytes, got shape "
            f"{list(message.shape)} with strides {list(message.strides)}"
        )


def _check_pools(
    sides: Iterable[tuple[CopySide, int]], pools: Sequence[Bytes], slots: Slots
) -> None:
    for side, unit_bytes in sides:
        pool = pools[side.pool]
        slot_bytes = side.slot_units * unit_bytes
        if pool.shape[1] != slot_bytes or not pool.flags.c_contiguous:
            raise ValueError(
                f"pool {side.pool}: expected contiguous slots of {slot_bytes} bytes, got "
                f"{list(pool.shape)} with strides {list(pool.strides)}"
            )
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(pool):
            raise ValueError(
                f"pool {side.pool} has {len(pool)} slots, got slots from {int(slots.min())} to "
                f"{int(slots.max())}"
            )
