"""How blocks of a group that is not direct pass through one contiguous message.

The message has a part for every pair of a sender's and a receiver's pool that share bytes, and a
part is ``[blocks, part bytes]``: the sender gathers the runs of each block in slot order, the
receiver scatters them. Runs are counted in units, the largest number of bytes that divides them all
and the slots, so that either pass is one indexed copy of rows ``[units, unit_bytes]`` a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from transfer.plan import Fragment, GroupPlan

ArrayT = TypeVar("ArrayT", contravariant=True)
Slots = npt.NDArray[np.int32]
Units = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CopySide:
    """One end of a part: the pool, its slots in units, and which units of a slot are copied."""

    pool: int
    slot_units: int
    units: Units
    """int64, in the order of the message."""

    @property
    def whole(self) -> bool:
        """Whether slots are copied as they are."""
        return np.array_equal(self.units, np.arange(self.slot_units))

    def rows(self, slots: Slots) -> Units:
        """Units of the whole pool, ``[blocks * units]`` int64, in the order of the message."""
        starts = slots.astype(np.int64) * self.slot_units
        return (starts[:, np.newaxis] + self.units).reshape(-1)


@dataclass(frozen=True, eq=False, slots=True)
class CopyPart:
    """What goes from one pool to one pool."""

    unit_bytes: int
    sender: CopySide
    receiver: CopySide

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return len(self.sender.units) * self.unit_bytes


@dataclass(frozen=True, eq=False, slots=True)
class CopyPlan:
    """Both passes of one group: from slots of the sender to a message, from there to slots of the
    receiver.
    """

    parts: tuple[CopyPart, ...]

    @classmethod
    def of(cls, group: GroupPlan) -> CopyPlan:
        """The passes of any group; a direct one needs none."""
        found: dict[tuple[int, int], list[Fragment]] = {}
        for piece in group.fragments:
            found.setdefault((piece.sender_pool, piece.receiver_pool), []).append(piece)
        return cls(tuple(_part(group, found[pools]) for pools in sorted(found)))

    @property
    def sender_pool(self) -> int | None:
        """The pool whose slots, one after the other, are the message; None where none is."""
        sides = [part.sender for part in self.parts]
        return sides[0].pool if len(sides) == 1 and sides[0].whole else None

    @property
    def receiver_pool(self) -> int | None:
        """The same of the receiver."""
        sides = [part.receiver for part in self.parts]
        return sides[0].pool if len(sides) == 1 and sides[0].whole else None

    @property
    def block_bytes(self) -> int:
        """Message bytes of one block."""
        return sum(part.block_bytes for part in self.parts)

    def part_bytes(self, blocks: int) -> Iterator[tuple[CopyPart, int, int]]:
        """Each part with its bytes ``[start, end)`` in a message of ``blocks`` blocks."""
        start = 0
        for part in self.parts:
            end = start + blocks * part.block_bytes
            yield part, start, end
            start = end


class PageCopies(Protocol[ArrayT]):
    """The two passes on one kind of memory.

    ``pools`` are the pools of one pool group, each uint8 ``[slots, slot bytes]``; ``slots`` are
    int32 ``[blocks]``; ``message`` is uint8 ``[blocks * block_bytes]``. Both raise ValueError for
    shapes that do not fit and for slots that are not there, before a byte is written; the checks
    can be had by themselves.
    """

    def check_gather(
        self, plan: CopyPlan, pools: Sequence[ArrayT], slots: Slots, message: ArrayT
    ) -> None:
        """Raise ValueError for what :meth:`gather` refuses."""

    def check_scatter(
        self, plan: CopyPlan, message: ArrayT, pools: Sequence[ArrayT], slots: Slots
    ) -> None:
        """Raise ValueError for what :meth:`scatter` refuses."""

    def gather(
        self, plan: CopyPlan, pools: Sequence[ArrayT], slots: Slots, message: ArrayT
    ) -> None:
        """Copy the sender's runs of ``slots`` into ``message``."""

    def scatter(
        self, plan: CopyPlan, message: ArrayT, pools: Sequence[ArrayT], slots: Slots
    ) -> None:
        """Copy ``message`` into the receiver's runs of ``slots``, and touch no other byte."""


def _part(group: GroupPlan, fragments: list[Fragment]) -> CopyPart:
    ordered = sorted(fragments, key=lambda piece: piece.sender_offset_bytes)
    sender_pool, receiver_pool = ordered[0].sender_pool, ordered[0].receiver_pool
    sender_slot = group.sender.slot_bytes[sender_pool]
    receiver_slot = group.receiver.slot_bytes[receiver_pool]
    unit = gcd(
        sender_slot,
        receiver_slot,
        *(piece.sender_offset_bytes for piece in ordered),
        *(piece.receiver_offset_bytes for piece in ordered),
        *(piece.size_bytes for piece in ordered),
    )
    counts = [piece.size_bytes // unit for piece in ordered]
    sender = _units([piece.sender_offset_bytes // unit for piece in ordered], counts)
    receiver = _units([piece.receiver_offset_bytes // unit for piece in ordered], counts)
    return CopyPart(
        unit,
        CopySide(sender_pool, sender_slot // unit, sender),
        CopySide(receiver_pool, receiver_slot // unit, receiver),
    )


def _units(starts: list[int], counts: list[int]) -> Units:
    return np.concatenate(
        [
            np.arange(start, start + count, dtype=np.int64)
            for start, count in zip(starts, counts, strict=True)
        ]
    )
