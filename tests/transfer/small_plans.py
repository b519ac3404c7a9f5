"""Small plans, and leases of nobody's pages, for tests of one session at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from transfer.costs import TransferCosts
from transfer.lease import GroupBlocks, LeasedBlocks
from transfer.plan import Fragment, GroupPlan, GroupSide, TransferPlan


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
"""Group 0 has two pools. A staged message takes two of its blocks."""
STAGING_PLAN = replace(PLAN, stages=True)
"""Both memories can stage."""
MIXED_PLAN = replace(STAGING_PLAN, groups=(_halves_change_places(PLAN.groups[0]), PLAN.groups[1]))
"""Layouts of group 0 differ."""
DEAR_MESSAGES = TransferCosts(message_us=1e6)
"""Whatever can be staged is."""


@dataclass(eq=False)
class FakeLease:
    """A lease of ``tables[view][first_block:end_block]``; sessions only hand it back."""

    tables: tuple[npt.NDArray[np.int32], ...]
    first_block: int
    end_block: int
    over: bool = field(default=False, init=False)

    def slots(self, view: int) -> npt.NDArray[np.int32]:
        return self.tables[view][self.first_block : self.end_block]

    def blocks(self, first_blocks: tuple[int, ...]) -> LeasedBlocks:
        """As a session wants it, each group from its own first block."""
        groups = zip(first_blocks, self.tables, strict=True)
        return LeasedBlocks(
            self,
            tuple(GroupBlocks(first, table[first : self.end_block]) for first, table in groups),
        )

    def release(self) -> None:
        assert not self.over, "a lease ended twice"
        self.over = True

    def quarantine(self) -> None:
        assert not self.over, "an ended lease came in doubt"
