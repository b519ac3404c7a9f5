"""Fake pages that know their owner, sequences that own them, leases that end at most once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transfer.lease import GroupBlocks, LeasedBlocks
from transfer.plan import Fragment, GroupPlan, GroupSide, TransferPlan
from transfer.region import Region

WINDOW_BLOCKS = 3


def _group(layer_group: int, slot_bytes: tuple[int, ...]) -> GroupPlan:
    side = GroupSide(layer_group, layer_group, slot_bytes)
    whole = tuple(Fragment(pool, 0, pool, 0, size) for pool, size in enumerate(slot_bytes))
    return GroupPlan(side, side, whole)


PLAN = TransferPlan((_group(0, (64, 16)), _group(1, (32,))))
"""Group 0: full attention, two pools. Group 1: the last WINDOW_BLOCKS blocks are wanted."""


class Pages:
    """Slots of one rank, one pool group a layer group; the lowest free slots first."""

    def __init__(self, slots: int) -> None:
        self.owner: list[list[Sequence | None]] = [[None] * slots for _ in PLAN.groups]
        self.content: dict[tuple[int, int, int], object] = {}

    def take(self, group: int, blocks: int, owner: Sequence) -> list[int] | None:
        """``blocks`` free slots, or None when there are fewer."""
        free = [slot for slot, held in enumerate(self.owner[group]) if held is None][:blocks]
        if len(free) < blocks:
            return None
        for slot in free:
            self.owner[group][slot] = owner
        return free

    def drop(self, owner: Sequence) -> None:
        """Free all slots of ``owner``."""
        for group in self.owner:
            group[:] = [None if held is owner else held for held in group]

    def owners(self) -> set[Sequence]:
        """Sequences that hold a slot."""
        return {held for group in self.owner for held in group if held is not None}

    def read(self, region: Region, owner: Sequence) -> list[object]:
        """Content of a region. Fails when a slot has got another owner."""
        return [self.content.get(place) for place in self._places(region, owner)]

    def write(self, region: Region, owner: Sequence, content: list[object]) -> None:
        """Fill a region. Fails when a slot has got another owner."""
        for place, value in zip(self._places(region, owner), content, strict=True):
            self.content[place] = value

    def _places(self, region: Region, owner: Sequence) -> list[tuple[int, int, int]]:
        slots = range(region.first_slot, region.first_slot + region.num_slots)
        for slot in slots:
            assert self.owner[region.pool_group][slot] is owner, (
                f"slot {slot} of pool group {region.pool_group} was touched after reuse"
            )
        return [(region.pool_group, region.pool, slot) for slot in slots]


@dataclass(eq=False)
class Sequence:
    """Pages of one request on one rank; they go back when nothing needs them."""

    pages: Pages
    tables: list[npt.NDArray[np.int32]]
    leases: list[FakeLease] = field(default_factory=list)
    open: bool = True

    @classmethod
    def allocate(cls, pages: Pages, blocks: int, first_blocks: tuple[int, ...]) -> Sequence | None:
        """Pages of blocks ``[first_blocks[g], blocks)`` of each group g; None when short."""
        sequence = cls(pages, [np.full(blocks, -1, dtype=np.int32) for _ in PLAN.groups])
        for group, first_block in enumerate(first_blocks):
            slots = pages.take(group, blocks - first_block, sequence)
            if slots is None:
                pages.drop(sequence)
                return None
            sequence.tables[group][first_block:] = slots
        return sequence

    def lease(self, first_block: int, end_block: int) -> FakeLease:
        """Pin blocks ``[first_block, end_block)``."""
        lease = FakeLease(self, first_block, end_block)
        self.leases.append(lease)
        return lease

    def close(self) -> None:
        """The engine needs the pages no more."""
        self.open = False
        self.let_go()

    def let_go(self) -> None:
        """Free the pages when neither engine nor lease needs them."""
        if not self.open and all(lease.over for lease in self.leases):
            self.pages.drop(self)


@dataclass(eq=False)
class FakeLease:
    """A lease of a sequence's pages."""

    sequence: Sequence
    first_block: int
    end_block: int
    over: bool = False
    doubted: bool = False

    def slots(self, view: int) -> npt.NDArray[np.int32]:
        """Slots of one layer group: views and groups are numbered alike here."""
        return self.sequence.tables[view][self.first_block : self.end_block].copy()

    def blocks(self, first_blocks: tuple[int, ...] | None = None) -> LeasedBlocks:
        """As a session wants it, each group from its own first block."""
        firsts = first_blocks or (self.first_block,) * len(PLAN.groups)
        return LeasedBlocks(
            self,
            tuple(
                GroupBlocks(first, self.sequence.tables[group][first : self.end_block].copy())
                for group, first in enumerate(firsts)
            ),
        )

    def release(self) -> None:
        """The last access is over."""
        assert not self.over, "a lease ended twice"
        self.over = True
        self.sequence.let_go()

    def quarantine(self) -> None:
        """The access may not be over."""
        assert not self.over, "an ended lease came in doubt"
        assert not self.doubted, "a lease came in doubt twice"
        self.doubted = True
