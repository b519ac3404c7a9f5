"""Leased pages as a session sees them: slot numbers a layer group, plus the lease, handed back.

The engine owns leases. A session only says when the last access to one is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache_core.layout import LayoutPlan


class TransferLease(Protocol):
    """Pinned pages of blocks ``[first_block, end_block)``; ``kvcache_core``'s PageLease is one.

    Blocks count over the whole sequence, also on a context parallel rank, which holds some of them.

    Sessions call none of these methods: the engine does when it is told that access is over.
    """

    first_block: int
    end_block: int

    def slots(self, view: int) -> npt.NDArray[np.int32]:
        """Slots of the blocks in one view of the layout plan, of a state its one slot; -1 where no
        page is held: a window has passed the block, or another context parallel rank holds it.
        """

    def release(self) -> None:
        """Return the pages; the last access has ended."""

    def quarantine(self) -> None:
        """Keep the pages out of use; a lost peer may still touch them."""


@dataclass(frozen=True, eq=False, slots=True)
class GroupBlocks:
    """Slots of blocks ``first_block, first_block + 1, ...`` of one layer group, int32.

    -1 where no page is held.
    """

    first_block: int
    slots: npt.NDArray[np.int32]

    @property
    def end_block(self) -> int:
        """First block after the last one."""
        return self.first_block + len(self.slots)


@dataclass(frozen=True, eq=False, slots=True)
class LeasedBlocks:
    """One lease and its slots, one entry a layer group of the pair's plan, in its order."""

    lease: TransferLease
    groups: tuple[GroupBlocks, ...]


def views_of_groups(layout: LayoutPlan) -> dict[int, int]:
    """A view of each layer group: all views of a group have the same slots."""
    return {view.layer_group: view.id for view in layout.views}
