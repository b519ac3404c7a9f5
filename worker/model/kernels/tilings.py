"""Tile sizes of the attention kernels: fixed, since searching for them would cost start-up time.

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
    # Two programs of 4 warps fit a multiprocessor with about 100 KB of keys and values in flight
    # each, three times what its share of the bandwidth needs to cover the memory's latency.
    (1, 128): Tiling(1, 64, 4, 3),
    (1, 256): Tiling(1, 32, 4, 3),
    (2, 128): Tiling(1, 64, 4, 3),
    (2, 256): Tiling(1, 32, 4, 3),
    (4, 128): Tiling(1, 32, 4, 2),
    (4, 256): Tiling(1, 16, 4, 2),
}
_PREFILL: Final[dict[tuple[int, int], Tiling]] = {
    # 128 queries are two rows of 64 for the tensor cores' wide products; wider heads need the
    # registers for their sums. float32 has no such products, and needs less of everything.
    (1, 128): Tiling(128, 64, 8, 2),
    (1, 256): Tiling(64, 32, 4, 2),
    (2, 128): Tiling(128, 64, 8, 3),
    (2, 256): Tiling(64, 32, 4, 2),
    (4, 128): Tiling(32, 32, 4, 2),
    (4, 256): Tiling(16, 16, 4, 2),
}
"""(bytes of an element in the pages, width of a head up to) -> tiling."""


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
