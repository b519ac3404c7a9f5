"""Cut of a group's staged blocks into messages: each as many blocks as a staging buffer takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from transfer.region import Staged

STAGING_MESSAGE_BYTES: Final = 16 << 20
"""Most bytes of a staged message of more than one block, in host memory. Blocks of an 8B-class
model of two ranks (4.5 MiB) take a tenth less processor time in such messages than one by one.
Other memories say what suits them; a pair takes the smaller.
"""
DEVICE_MESSAGE_BYTES: Final = 128 << 20
"""The same on a device: a message costs either process some 300 us of the interpreter, the time of
100 MB between two GPUs.
"""
MESSAGES_IN_MEMORY: Final = 1024
"""A device's memory over its largest message: the four buffers of a pair are 0.4 % of it."""
MIB: Final = 1 << 20
Slots = npt.NDArray[np.int32]


def device_message_bytes(memory_bytes: int) -> int:
    """Largest message that suits a device of so much memory, in whole MiB."""
    return min(DEVICE_MESSAGE_BYTES, max(MIB, memory_bytes // MESSAGES_IN_MEMORY // MIB * MIB))


def most_blocks(block_bytes: int, message_bytes: int) -> int:
    """Most blocks of one message of up to ``message_bytes``; a block is never cut."""
    return max(1, message_bytes // block_bytes)


def most_bytes(block_bytes: int, message_bytes: int) -> int:
    """Bytes of the largest message of such blocks."""
    return most_blocks(block_bytes, message_bytes) * block_bytes


def staged_messages(blocks: int, block_bytes: int, message_bytes: int) -> int:
    """Messages that ``blocks`` blocks take."""
    return -(-blocks // most_blocks(block_bytes, message_bytes))


def staged_lengths(blocks: int, block_bytes: int, message_bytes: int) -> Slots:
    """Blocks of each message, int32: as few messages as can be, of one length but for a block that
    the first ones have less; a short message costs as much beside its bytes as a long one.
    """
    count = staged_messages(blocks, block_bytes, message_bytes)
    ends = np.arange(count + 1, dtype=np.int64) * blocks // max(count, 1)
    return np.diff(ends).astype(np.int32)


def staged_pieces(
    group: int,
    slots: Slots,
    lengths: Sequence[int] | Slots,
    block_bytes: int,
    message_bytes: int,
) -> Iterator[tuple[Staged, int]]:
    """Messages of group ``group`` on one end, each with its bytes.

    Raises ValueError when the lengths do not cut ``slots`` into messages of a staging buffer.
    """
    if int(np.sum(lengths, dtype=np.int64)) != len(slots):
        raise ValueError(
            f"messages cover {int(np.sum(lengths, dtype=np.int64))} blocks, expected {len(slots)}"
        )
    most = most_blocks(block_bytes, message_bytes)
    start = 0
    for value in lengths:
        length = int(value)
        if not 1 <= length <= most:
            raise ValueError(f"message of {length} blocks, expected 1 to {most}")
        yield Staged(group, slots[start : start + length]), length * block_bytes
        start += length
