"""What one page message carries on one end: consecutive slots of one pool, or blocks that pass
through staging.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Region:
    """Slots ``[first_slot, first_slot + num_slots)`` of pool ``pool`` of ``pool_group``, one run
    of bytes.
    """

    pool_group: int
    pool: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True, eq=False, slots=True)
class Staged:
    """Blocks of the plan's group ``group``, gathered into one message and scattered from it."""

    group: int
    slots: npt.NDArray[np.int32]
    """The slot of each block on this side, in the order of the message."""


Piece = Region | Staged


@dataclass(frozen=True, slots=True)
class Post:
    """One send or receive to post. ``id`` is unique within the session and comes back in
    ``PostEnded``.
    """

    id: int
    region: Piece
    size_bytes: int
