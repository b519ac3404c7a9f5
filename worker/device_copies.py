"""Gather and scatter on torch tensors: which units move is said by two small index tensors on the
device, whatever moves them.

Memory is counted in *words*: the widest element, of up to 8 bytes, that divides the units and the
addresses. Long units move as several of at most ``PIECE_BYTES``, so that few kernels serve every
layout. All index arithmetic is of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from transfer.copy_plan import CopyPart, CopyPlan, CopySide, PageCopies, Slots

WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Word types by their bytes."""
PIECE_BYTES: Final = 512
"""As fast as longer ones: a thread copies 16 bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class UnitIndex:
    """Units of a pool in the order of a message: of each slot the same ones."""

    slots: torch.Tensor
    """int32 ``[blocks]``."""
    units: torch.Tensor
    """int64 ``[units of a block]``, counted from the slot's first."""
    slot_units: int
    unit_words: int
    word_bytes: int

    def rows(self) -> torch.Tensor:
        """Units of the whole pool, int64 ``[blocks * units of a block]``."""
        return (self.slots.long()[:, None] * self.slot_units + self.units).view(-1)


class UnitMover(Protocol):
    """Moves units between one pool and one message, both contiguous, uint8, with addresses and
    bytes that ``index.word_bytes`` divides. Operations are queued in the current stream.
    """

    def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
        """Copy the pool's units into ``message``."""

    def scatter(self, message: torch.Tensor, pool: torch.Tensor, index: UnitIndex) -> None:
        """Copy ``message`` into the pool's units."""


class IndexedUnits(UnitMover):
    """torch's own indexed copies of rows: on any device."""

    @override
    def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
        rows, target = _rows(pool, index), _rows(message, index)
        torch.index_select(rows, 0, index.rows(), out=target)

    @override
    def scatter(self, message: torch.Tensor, pool: torch.Tensor, index: UnitIndex) -> None:
        _rows(pool, index).index_copy_(0, index.rows(), _rows(message, index))


def _rows(memory: torch.Tensor, index: UnitIndex) -> torch.Tensor:
    return memory.view(-1).view(WORDS[index.word_bytes]).view(-1, index.unit_words)


class DeviceCopies(PageCopies[torch.Tensor]):
    """``PageCopies`` on contiguous uint8 tensors of one device. The operations are queued in the
    current stream; one thread at a time uses an instance.
    """

    def __init__(self, mover: UnitMover) -> None:
        self._mover = mover
        self._pieces: WeakKeyDictionary[CopySide, torch.Tensor] = WeakKeyDictionary()

    @override
    def check_gather(
        self, plan: CopyPlan, pools: Sequence[torch.Tensor], slots: Slots, message: torch.Tensor
    ) -> None:
        """Raise ValueError for what :meth:`gather` refuses."""
        _check_message(plan, message, slots)
        _check_pools(((part.sender, part.unit_bytes) for part in plan.parts), pools, slots)

    @override
    def check_scatter(
        self, plan: CopyPlan, message: torch.Tensor, pools: Sequence[torch.Tensor], slots: Slots
    ) -> None:
        """Raise ValueError for what :meth:`scatter` refuses."""
        _check_message(plan, message, slots)
        _check_pools(((part.receiver, part.unit_bytes) for part in plan.parts), pools, slots)

    @override
    def gather(
        self, plan: CopyPlan, pools: Sequence[torch.Tensor], slots: Slots, message: torch.Tensor
    ) -> None:
        """Copy the sender's runs of ``slots`` into ``message``."""
        self.check_gather(plan, pools, slots, message)
        for part, place, piece in self._parts(plan, slots, message):
            pool = pools[part.sender.pool]
            self._mover.gather(pool, self._index(part, part.sender, pool, piece, place), piece)

    @override
    def scatter(
        self, plan: CopyPlan, message: torch.Tensor, pools: Sequence[torch.Tensor], slots: Slots
    ) -> None:
        """Copy ``message`` into the receiver's runs of ``slots``."""
        self.check_scatter(plan, message, pools, slots)
        for part, place, piece in self._parts(plan, slots, message):
            pool = pools[part.receiver.pool]
            self._mover.scatter(piece, pool, self._index(part, part.receiver, pool, piece, place))

    def _parts(
        self, plan: CopyPlan, slots: Slots, message: torch.Tensor
    ) -> Iterator[tuple[CopyPart, torch.Tensor, torch.Tensor]]:
        """Parts that hold something, each with the slots on the device and its piece of the
        message.
        """
        if not len(slots):
            return
        place = _uploaded(slots, message.device)
        for part, start, end in plan.part_bytes(len(slots)):
            yield part, place, message if len(plan.parts) == 1 else message[start:end]

    def _index(
        self,
        part: CopyPart,
        side: CopySide,
        pool: torch.Tensor,
        piece: torch.Tensor,
        slots: torch.Tensor,
    ) -> UnitIndex:
        """Which units move between this pool and this piece."""
        unit_bytes = gcd(part.unit_bytes, PIECE_BYTES)
        size = gcd(max(WORDS), unit_bytes, pool.data_ptr(), piece.data_ptr())
        pieces = part.unit_bytes // unit_bytes
        units = self._pieces.get(side)
        if units is None:
            starts = side.units[:, np.newaxis] * pieces
            units = _uploaded((starts + np.arange(pieces)).reshape(-1), pool.device)
            self._pieces[side] = units
        return UnitIndex(slots, units, side.slot_units * pieces, unit_bytes // size, size)


def _uploaded(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """On the device when what is queued next runs, and not waited for: torch keeps the pinned
    memory until it was read.
    """
    kind = torch.int32 if values.dtype == np.int32 else torch.int64
    here = torch.empty(len(values), dtype=kind, pin_memory=device.type == "cuda")
    here.numpy()[:] = values
    return here.to(device, non_blocking=True)


def _check_message(plan: CopyPlan, message: torch.Tensor, slots: Slots) -> None:
    size = len(slots) * plan.block_bytes
    if message.shape != (size,) or not message.is_contiguous():
        raise ValueError(
            f"message of {len(slots)} blocks: expected {size} contiguous bytes, got shape "
            f"{list(message.shape)} with strides {list(message.stride())}"
        )


def _check_pools(
    sides: Iterable[tuple[CopySide, int]], pools: Sequence[torch.Tensor], slots: Slots
) -> None:
    lowest, highest = (int(slots.min()), int(slots.max())) if len(slots) else (0, -1)
    for side, unit_bytes in sides:
        pool = pools[side.pool]
        slot_bytes = side.slot_units * unit_bytes
        if pool.shape[1] != slot_bytes or not pool.is_contiguous():
            raise ValueError(
                f"pool {side.pool}: expected contiguous slots of {slot_bytes} bytes, got "
                f"{list(pool.shape)} with strides {list(pool.stride())}"
            )
        if lowest < 0 or highest >= len(pool):
            raise ValueError(
                f"pool {side.pool} has {len(pool)} slots, got slots from {lowest} to {highest}"
            )
