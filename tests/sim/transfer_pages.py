"""Fake pages that know their owner, sequences that own them, leases that end at most once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from transfer.costs import TransferCosts
from transfer.lease import GroupBlocks, LeasedBlocks
from transfer.plan import Fragment, GroupPlan, GroupSide, TransferPlan

WINDOW_BLOCKS = 3


def _group(layer_group: int, slot_bytes: tuple[int, ...]) -> GroupPlan:
    side = GroupSide(layer_group, layer_group, slot_bytes)
    whole = tuple(Fragment(pool, 0, pool, 0, size) for pool, size in enumerate(slot_bytes))
    return GroupPlan(side, side, whole)


def _halves_change_places(group: GroupPlan) -> GroupPlan:
    return replace(
        group,
        fragments=tuple(
            Fragment(pool, start, pool, size // 2 - start, size // 2)
            for pool, size in enumerate(group.sender.slot_bytes)
            for start in (0, size // 2)
        ),
    )


PLAN = TransferPlan((_group(0, (64, 16)), _group(1, (32,))), message_bytes=2 * 80)
"""Group 0: full attention, two pools. Group 1: the last WINDOW_BLOCKS blocks are wanted. A staged
message takes two blocks of group 0.
"""
STAGING_PLAN = replace(PLAN, stages=True)
"""Both memories can stage."""
MIXED_PLAN = replace(STAGING_PLAN, groups=(_halves_change_places(PLAN.groups[0]), PLAN.groups[1]))
"""Layouts of group 0 differ."""


@dataclass(frozen=True)
class Terrain:
    """How pages lie on both ends, and what moving them costs."""

    plan: TransferPlan = PLAN
    costs: TransferCosts = field(default_factory=TransferCosts)
    stride: int = 1
    """Slots are taken in this stride, which has no factor in common with their number."""
    pass_ms: int = 0
    """A gather or scatter takes up to so long, as on a device; with 0 it is over at once."""


DEAR_MESSAGES = TransferCosts(message_us=1e6)
WHOLE = Terrain()
FRAGMENTED = Terrain(STAGING_PLAN, DEAR_MESSAGES, stride=7)
MIXED = Terrain(MIXED_PLAN, stride=5, pass_ms=40)


class Pages:
    """Slots of one rank, one pool group a layer group, and what is in them: values of
    ``(request id, block, group, pool)`` by ``(group, pool, slot)``.
    """

    def __init__(self, slots: int, stride: int = 1) -> None:
        self.owner: list[list[Sequence | None]] = [[None] * slots for _ in PLAN.groups]
        self.content: dict[tuple[int, int, int], Value] = {}
        self._order = [number * stride % slots for number in range(slots)]

    def take(self, group: int, blocks: int, owner: Sequence) -> list[int] | None:
        """``blocks`` free slots, or None when there are fewer."""
        free = [slot for slot in self._order if self.owner[group][slot] is None][:blocks]
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

    def owner_of(self, group: int, slot: int) -> Sequence:
        """Whose slot this is. Fails when it is nobody's."""
        held = self.owner[group][slot]
        assert held is not None, f"slot {slot} of pool group {group} was touched when free"
        return held

    def read(self, places: list[Place]) -> list[Value]:
        """Content of these slots."""
        return [self.content[place] for place in places]

    def write(self, places: list[Place], values: list[Value]) -> None:
        """Fill these slots. Fails when one belongs to another request."""
        for (group, pool, slot), value in zip(places, values, strict=True):
            owner = self.owner_of(group, slot)
            assert value[0] == owner.request_id, (
                f"slot {slot} of pool group {group} of {owner.request_id} got {value}"
            )
            self.content[group, pool, slot] = value


Place = tuple[int, int, int]
Value = tuple[str, int, int, int]


@dataclass(eq=False)
class Sequence:
    """Pages of one request on one rank; they go back when nothing needs them."""

    pages: Pages
    tables: list[npt.NDArray[np.int32]]
    request_id: str = ""
    leases: list[FakeLease] = field(default_factory=list)
    open: bool = True

    @classmethod
    def allocate(
        cls, pages: Pages, request_id: str, blocks: int, first_blocks: tuple[int, ...]
    ) -> Sequence | None:
        """Pages of blocks ``[first_blocks[g], blocks)`` of each group g; None when short."""
        tables = [np.full(blocks, -1, dtype=np.int32) for _ in PLAN.groups]
        sequence = cls(pages, tables, request_id)
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
