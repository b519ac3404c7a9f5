"""What attention kernels must know about a step, as int32 numbers in one vector: one upload a step.

All layers of all layer groups read views of that vector. Its layout follows from a
:class:`MetadataShape` alone, so a captured graph may hold one device vector and have it overwritten
in place. Sequences that pad a batch have length 0, no blocks and rows whose writes go nowhere
(slot -1); kernels neither read nor write for them.

    shared     starts, lengths [sequences], first_rows [sequences + 1],
               tile_sequences, tile_offsets [tiles]
               drawn_sequences, drawn_offsets [drawn_tiles]
    a group    block_table [sequences, width], write_slots, write_offsets [rows]

Decodes come first: sequence i < ``decodes`` has exactly row i. Prefills follow, ragged, cut into
tiles of at most TILE_TOKENS queries, those that see most first. Drawn tiles are those of them that
have a sequence's last row, where its logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NoReturn

import numpy as np
import torch

from kvcache_core.arithmetic import ceil_div
from worker.model.errors import AttentionInputError
from worker.model.step import GroupGeometry, Ints, Longs, SequenceSlice

TILE_TOKENS: Final = 128
"""Queries of one sequence in a prefill tile. Kernels with smaller tiles cut it further."""
SHARED: Final = 7
"""Parts that are not of a layer group."""
ALIGNMENT: Final = 4
"""Numbers to which every part is aligned: 16 bytes."""


@dataclass(frozen=True)
class MetadataShape:
    """How much of everything there is; what a captured graph is keyed by.

    ``widths``: blocks in the block table of each layer group.
    """

    decodes: int
    sequences: int
    rows: int
    tiles: int
    drawn_tiles: int
    widths: tuple[int, ...]

    @classmethod
    def for_decode(cls, sequences: int, widths: Sequence[int]) -> MetadataShape:
        """A decode batch of up to ``sequences`` sequences, padded."""
        return cls(sequences, sequences, sequences, 0, 0, tuple(widths))

    @classmethod
    def of(
        cls, pieces: Sequence[SequenceSlice], geometries: Sequence[GroupGeometry]
    ) -> MetadataShape:
        """Exactly this batch (decodes first, as in :func:`worker.model.step.order`)."""
        counts = [len(piece.tokens) for piece in pieces]
        decodes = sum(count == 1 for count in counts)
        return cls(
            decodes=decodes,
            sequences=len(pieces),
            rows=sum(counts),
            tiles=sum(ceil_div(count, TILE_TOKENS) for count in counts[decodes:]),
            drawn_tiles=sum(piece.wants_logits for piece in pieces[decodes:]),
            widths=tuple(
                max(ceil_div(piece.end, geometry.tokens_per_block) for piece in pieces)
                for geometry in geometries
            ),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each part, in the vector's order."""
        shared = (self.sequences, self.sequences, self.sequences + 1)
        tiles = (self.tiles, self.tiles, self.drawn_tiles, self.drawn_tiles)
        groups = [(self.sequences * width, self.rows, self.rows) for width in self.widths]
        return (*shared, *tiles, *(size for group in groups for size in group))

    @property
    def offsets(self) -> tuple[int, ...]:
        """First number of each part, and the vector's length at the end."""
        found = [0]
        for size in self.sizes:
            found.append(found[-1] + ceil_div(size, ALIGNMENT) * ALIGNMENT)
        return tuple(found)

    @property
    def total(self) -> int:
        """int32 numbers in the vector."""
        return self.offsets[-1]


@dataclass(frozen=True)
class GroupMetadata:
    """What one layer group adds: int32 ``[sequences, width]``, ``[rows]`` and ``[rows]``."""

    block_table: torch.Tensor
    write_slots: torch.Tensor
    write_offsets: torch.Tensor


class StepMetadata:
    """Views of one int32 vector ``[shape.total]`` on the pages' device; owns nothing."""

    def __init__(self, shape: MetadataShape, vector: torch.Tensor) -> None:
        """Raises AttentionInputError: the vector is not int32, contiguous and of that length."""
        if (
            vector.dtype != torch.int32
            or vector.shape != (shape.total,)
            or not vector.is_contiguous()
        ):
            raise AttentionInputError(
                f"expected step metadata as contiguous int32 [{shape.total}], got {vector.dtype} "
                f"{list(vector.shape)}"
            )
        begins = shape.offsets[:-1]
        parts = [
            vector[begin : begin + size] for begin, size in zip(begins, shape.sizes, strict=True)
        ]
        self.shape = shape
        self.vector = vector
        self.starts, self.lengths, self.first_rows = parts[:3]
        self.tile_sequences, self.tile_offsets = parts[3:5]
        self._drawn = parts[5:SHARED]
        self.groups = tuple(
            GroupMetadata(parts[at].view(shape.sequences, width), parts[at + 1], parts[at + 2])
            for at, width in zip(range(SHARED, len(parts), 3), shape.widths, strict=True)
        )

    def of_drawn(self) -> StepMetadata:
        """The same step with no other tiles than those with wanted logits."""
        drawn = copy(self)
        drawn.shape = replace(self.shape, tiles=self.shape.drawn_tiles)
        drawn.tile_sequences, drawn.tile_offsets = self._drawn
        return drawn


def describe_step(
    pieces: Sequence[SequenceSlice], geometries: Sequence[GroupGeometry], shape: MetadataShape
) -> Ints:
    """The vector of a checked batch in flat order, padded to ``shape``: int32 ``[shape.total]``.

    Raises:
        AttentionInputError: the batch does not fit the shape.
    """
    exact = MetadataShape.of(pieces, geometries)
    limits = zip(
        (exact.sequences, exact.rows, exact.tiles, exact.drawn_tiles, *exact.widths),
        (shape.sequences, shape.rows, shape.tiles, shape.drawn_tiles, *shape.widths),
        strict=True,
    )
    pads = exact.sequences < shape.sequences or exact.rows < shape.rows
    if any(have > most for have, most in limits) or (
        exact.decodes != exact.sequences if pads else exact.decodes != shape.decodes
    ):
        raise AttentionInputError(
            f"expected a batch that fits {shape} (padded ones decode only), got {exact}"
        )
    vector = np.zeros(shape.total, np.int32)
    parts = _parts(vector, shape)
    starts, lengths, first_rows = parts[:3]
    counts = np.array([len(piece.tokens) for piece in pieces], np.int32)
    count = len(pieces)
    starts[:count] = [piece.start for piece in pieces]
    lengths[:count] = starts[:count] + counts
    # A padding sequence has a row of its own too, so that decode row i is sequence i.
    first_rows[1:] = np.arange(1, shape.sequences + 1)
    first_rows[1 : count + 1] = np.cumsum(counts)
    tiles, drawn = _tiles(pieces, exact.decodes)
    _fill_tiles(tiles, *parts[3:5])
    _fill_tiles(drawn, *parts[5:SHARED])
    positions = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
    for group, geometry in enumerate(geometries):
        table, slots, offsets = parts[SHARED + 3 * group :][:3]
        by_sequence = table.reshape(shape.sequences, shape.widths[group])
        by_sequence[:] = -1
        slots[:] = -1
        ordinals = positions // geometry.tokens_per_block
        for i, (piece, (begin, end)) in enumerate(
            zip(pieces, pairwise(first_rows[: count + 1].tolist()), strict=True)
        ):
            used = piece.block_tables[group][: ceil_div(piece.end, geometry.tokens_per_block)]
            by_sequence[i, : len(used)] = used
            slots[begin:end] = used[ordinals[begin:end]]
        offsets[: exact.rows] = positions - ordinals * geometry.tokens_per_block
    return vector


def describe_padding(shape: MetadataShape) -> Ints:
    """The vector of a decode batch without sequences."""
    vector = np.zeros(shape.total, np.int32)
    parts = _parts(vector, shape)
    parts[2][:] = np.arange(shape.sequences + 1)
    for table, slots in zip(parts[SHARED::3], parts[SHARED + 1 :: 3], strict=True):
        table[:] = -1
        slots[:] = -1
    return vector


def describe_decode(
    vector: Ints,
    pieces: Sequence[SequenceSlice],
    geometries: Sequence[GroupGeometry],
    shape: MetadataShape,
) -> None:
    """Change ``vector``, which describes a padded decode batch, to describe ``pieces``: single
    tokens that fit the shape. Blocks beyond a sequence's length keep what they held: they are not
    read.

    Raises:
        AttentionInputError: a table is too short, or a visible block is not in the pool. The vector
            is to be described anew before it is used.
    """
    count = len(pieces)
    parts = _parts(vector, shape)
    starts = np.array([piece.start for piece in pieces], np.int64)
    for part, values in ((parts[0], starts), (parts[1], starts + 1)):
        part[:count] = values
        part[count:] = 0
    rows = np.arange(count)
    for group, geometry in enumerate(geometries):
        table, slots, offsets = parts[SHARED + 3 * group :][:3]
        by_sequence = table.reshape(shape.sequences, shape.widths[group])
        ordinals = starts // geometry.tokens_per_block
        used = ordinals + 1
        own = [
            piece.block_tables[group][:blocks]
            for piece, blocks in zip(pieces, used.tolist(), strict=True)
        ]
        flat = np.concatenate(own)
        if len(flat) != int(used.sum()):
            _say_too_short(own, used, group)
        sequences = np.repeat(rows, used)
        blocks = np.arange(len(flat)) - np.repeat(np.cumsum(used) - used, used)
        _check_slots(flat, blocks, starts[sequences], geometry, group)
        by_sequence[sequences, blocks] = flat
        slots[:count] = by_sequence[rows, ordinals]
        slots[count:] = -1
        offsets[:count] = starts - ordinals * geometry.tokens_per_block


def _check_slots(
    slots: Ints, blocks: Longs, starts: Longs, geometry: GroupGeometry, group: int
) -> None:
    """Every block that a token at its start sees must have a slot of the pool."""
    bad = (slots < 0) | (slots >= geometry.num_slots)
    if geometry.window is not None and bad.any():
        size = geometry.tokens_per_block
        first = np.maximum(0, starts + 1 - geometry.window) // size
        bad &= (blocks >= first) | (blocks < ceil_div(geometry.sink_tokens, size))
    if bad.any():
        raise AttentionInputError(
            f"layer group {group}: expected slots in 0..{geometry.num_slots - 1} for every visible "
            f"block, got {slots[bad].tolist()}"
        )


def _say_too_short(tables: Sequence[Ints], used: Longs, group: int) -> NoReturn:
    lacking = [(len(table), need) for table, need in zip(tables, used.tolist(), strict=True)]
    have, need = next(pair for pair in lacking if pair[0] < pair[1])
    raise AttentionInputError(
        f"layer group {group}: a sequence needs {need} blocks, its block table has {have}"
    )


def _parts(vector: Ints, shape: MetadataShape) -> list[Ints]:
    return [
        vector[begin : begin + size]
        for begin, size in zip(shape.offsets[:-1], shape.sizes, strict=True)
    ]


Tile = tuple[int, int, int]
"""Keys before it, its sequence, its first query's offset among the sequence's new tokens."""


def _tiles(pieces: Sequence[SequenceSlice], decodes: int) -> tuple[list[Tile], list[Tile]]:
    """All tiles, and those with wanted logits."""
    tiles, drawn = [], []
    for i, piece in enumerate(pieces[decodes:], decodes):
        own = [(piece.start + at, i, at) for at in range(0, len(piece.tokens), TILE_TOKENS)]
        tiles += own
        if piece.wants_logits:
            drawn.append(own[-1])
    return tiles, drawn


def _fill_tiles(tiles: list[Tile], sequences: Ints, offsets: Ints) -> None:
    """Longest work first: tiles that start late would otherwise end the launch alone."""
    tiles.sort(key=lambda tile: (-tile[0], tile[1]))
    sequences[:] = [tile[1] for tile in tiles]
    offsets[:] = [tile[2] for tile in tiles]
