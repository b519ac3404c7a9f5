"""Tile sizes of the attention kernels: fixed, since searching for them would cost start-up time.

Registers and shared memory below are what Triton's compiler reports for compute capability 9.0.
``python -m benchmarks.attention --device cuda --sweep`` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from worker.model.step_metadata import TILE_TOKENS

LEAST_DOT: Final = 16
"""What a side of a tensor core product is padded to."""
MOST_SPLITS: Final = 64
PROGRAMS: Final = 2048
"""Decode programs that are wanted: on 132 multiprocessors, with 2 to 4 on each at a time, 4 to 8
turns, so that the last one is a small part of the whole.
"""


@dataclass(frozen=True)
class Tiling:
    """Queries and keys of a tile, warps of a program, tiles of keys in flight.

    A decode tile has no ``queries`` to choose: they are the query heads of one kv head.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if TILE_TOKENS % self.queries:
            raise ValueError(f"expected a divisor of {TILE_TOKENS} queries, got {self.queries}")


_DECODE: Final[dict[tuple[int, int], Tiling]] = {
    # The slot of a tile is a load before its own, which takes half of the stages: 5 keep two tiles
    # in flight (70 KB and 90 registers a thread at 2 bytes and width 128, so 3 programs and 192 KB
    # a multiprocessor), 3 keep one.
    (1, 128): Tiling(1, 64, 4, 5),
    (1, 256): Tiling(1, 32, 4, 5),
    (2, 128): Tiling(1, 64, 4, 5),
    (2, 256): Tiling(1, 32, 4, 5),
    (4, 128): Tiling(1, 32, 4, 2),
    (4, 256): Tiling(1, 16, 4, 2),
}
_PREFILL: Final[dict[tuple[int, int], Tiling]] = {
    # At width 128 a program of 4 warps leaves room for a second one, whose products run while the
    # first is at its softmax: on an H200 1,430 us where 8 warps take 1,601 (8,192 tokens of 32
    # heads), 273 where they take 311 (8 prompts of 1,024). At width 256 it is 64 queries for each
    # of two groups of 4 warps, which wide tensor core products work on; tiles of 64 keys spill
    # registers there, 32 leave it at 239 a thread. float32 has no such products.
    (1, 128): Tiling(128, 64, 4, 3),
    (1, 256): Tiling(128, 32, 8, 3),
    (2, 128): Tiling(128, 64, 4, 3),
    (2, 256): Tiling(128, 32, 8, 3),
    (4, 128): Tiling(32, 32, 4, 2),
    (4, 256): Tiling(16, 16, 4, 2),
}
"""(bytes of an element of the pages or the query, the larger; width of a head up to) -> tiling."""


def width_of(head_dim: int) -> int:
    """Columns of a tile: a power of two."""
    return max(LEAST_DOT, _next_power(head_dim))


def decode_tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    """Raises ValueError: heads wider than 256."""
    return _chosen(_DECODE, dtype, head_dim)


def prefill_tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    """Raises ValueError: heads wider than 256."""
    return _chosen(_PREFILL, dtype, head_dim)


def splits_of(sequences: int, num_kv_heads: int, tiles: int) -> int:
    """Parts of each sequence's keys: a power of two from what does not change between the steps of
    one captured graph. ``tiles``: tiles of keys that a block table has room for.
    """
    wanted = min(PROGRAMS // max(sequences * num_kv_heads, 1), MOST_SPLITS)
    return min(_next_power(wanted // 2 + 1), _next_power(max(tiles, 1)))


def _chosen(table: dict[tuple[int, int], Tiling], dtype: torch.dtype, head_dim: int) -> Tiling:
    width = max(128, width_of(head_dim))
    if (dtype.itemsize, width) not in table:
        raise ValueError(f"expected heads of at most 256 elements, got {head_dim} in {dtype}")
    return table[dtype.itemsize, width]


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1
