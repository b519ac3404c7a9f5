"""Runs of blocks: wanted blocks whose slots are consecutive on both ends travel as one message.

A run is told by its number of blocks; both ends know the slots, so each works out its own regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from transfer.plan import GroupSide
from transfer.region import Region

Slots = npt.NDArray[np.int32]


def run_lengths(sender_slots: Slots, receiver_slots: Slots) -> Slots:
    """Blocks of each run, int32, given the slots of the wanted blocks in order on both ends."""
    if len(sender_slots) != len(receiver_slots):
        raise ValueError(
            f"expected as many sender slots as receiver slots, got {len(sender_slots)} and "
            f"{len(receiver_slots)}"
        )
    if not len(sender_slots):
        return np.empty(0, dtype=np.int32)
    breaks = (np.diff(sender_slots) != 1) | (np.diff(receiver_slots) != 1)
    edges = np.concatenate(([0], np.flatnonzero(breaks) + 1, [len(sender_slots)]))
    return np.diff(edges).astype(np.int32)


def consecutive(slots: Slots) -> bool:
    """Whether slots are neighbours, in order."""
    return not np.any(np.diff(slots) != 1)


def staging_passes(pools: int, sender_slots: Slots, receiver_slots: Slots) -> int:
    """Ends of a direct group that copy when these blocks are staged: all but those whose slots, one
    after the other, are the message.
    """
    return sum(pools > 1 or not consecutive(slots) for slots in (sender_slots, receiver_slots))


def regions(side: GroupSide, slots: Slots, lengths: Sequence[int] | Slots) -> Iterator[Region]:
    """Regions of the runs on one end, run by run and in each run pool by pool.

    Raises ValueError when the lengths do not cut ``slots`` into runs of consecutive slots.
    """
    if int(np.sum(lengths, dtype=np.int64)) != len(slots):
        raise ValueError(
            f"runs cover {int(np.sum(lengths, dtype=np.int64))} blocks, expected {len(slots)}"
        )
    start = 0
    for value in lengths:
        length = int(value)
        run = slots[start : start + length]
        if length < 1 or not consecutive(run):
            raise ValueError(f"run of {length} blocks is not consecutive: slots {run.tolist()}")
        for pool in range(len(side.slot_bytes)):
            yield Region(side.pool_group, pool, int(run[0]), length)
        start += length


def whole_pieces(
    side: GroupSide, slots: Slots, lengths: Sequence[int] | Slots
) -> Iterator[tuple[Region, int]]:
    """:func:`regions`, each with its bytes."""
    for region in regions(side, slots, lengths):
        yield region, region.num_slots * side.slot_bytes[region.pool]
