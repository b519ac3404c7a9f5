"""Consecutive slots of one pool: what one page message carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Slots ``[first_slot, first_slot + num_slots)`` of pool ``pool`` of ``pool_group``, one run
    of bytes.
    """

    pool_group: int
    pool: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Post:
    """One send or receive to post. ``id`` is unique within the session and comes back in
    ``PostEnded``.
    """

    id: int
    region: Region
    size_bytes: int
