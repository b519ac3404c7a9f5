"""Leased pages as a session sees them: slot numbers a layer group, plus a handle it hands back
unread.

The engine owns leases. A session only says when the last access to one is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TransferLease(Protocol):
    """Handle of pinned pages; ``kvcache_core``'s PageLease is one. Sessions call none of these
    methods.
    """

    def release(self) -> None:
        """Return the pages; the last access has ended."""

    def quarantine(self) -> None:
        """Keep the pages out of use; a lost peer may still touch them."""


@dataclass(frozen=True, eq=False, slots=True)
class GroupBlocks:
    """Slots of blocks ``first_block, first_block + 1, ...`` of one layer group, int32, -1 where no
    page is held.
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
