"""What the manager needs from the outside: somebody who copies the bytes of slots."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int32]
"""Slot numbers ``[n]`` of one pool group, in one tier."""


class PageCopier(Protocol):
    """Copies whole slots, many at once, in all pools of one pool group.

    Device slots ``0..D-1`` and host slots ``0..H-1`` of a pool group are separate numberings. The
    two arrays of a call have the same length; targets are distinct, and no slot is both source and
    target. A source may occur several times. Each copy is ordered after every earlier write of the
    engine's stream and before every transfer that is posted after the call has returned.
    """

    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        """Copy device slots to device slots."""
        ...

    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Copy device slots to host slots, through the codec for cold pages where there is one."""
        ...

    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        """Copy host slots back to device slots."""
        ...
