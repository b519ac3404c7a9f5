"""One vector describes a step; views of it never move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from worker.model.errors import AttentionInputError
from worker.model.step import GroupGeometry, SequenceSlice
from worker.model.step_metadata import (
    TILE_TOKENS,
    MetadataShape,
    StepMetadata,
    describe_decode,
    describe_padding,
    describe_step,
)

GEOMETRIES = [GroupGeometry(8, None, 0, 100, 1), GroupGeometry(4, 6, 0, 100, 1)]


def piece(start: int, count: int) -> SequenceSlice:
    end = start + count
    tables = tuple(
        np.arange(-(-end // geometry.tokens_per_block), dtype=np.int32) + 10 * group
        for group, geometry in enumerate(GEOMETRIES)
    )
    return SequenceSlice(np.zeros(count, np.int32), start, tables, wants_logits=True)


def described(pieces: Sequence[SequenceSlice], shape: MetadataShape) -> StepMetadata:
    return StepMetadata(shape, torch.from_numpy(describe_step(pieces, GEOMETRIES, shape)))


def test_a_mixed_batch() -> None:
    pieces = [piece(9, 1), piece(2, 3), piece(0, TILE_TOKENS + 5)]
    shape = MetadataShape.of(pieces, GEOMETRIES)
    found = described(pieces, shape)
    assert (shape.decodes, shape.sequences, shape.rows, shape.tiles) == (1, 3, 137, 3)
    assert found.starts.tolist() == [9, 2, 0]
    assert found.lengths.tolist() == [10, 5, 133]
    assert found.first_rows.tolist() == [0, 1, 4, 137]
    # The tile that sees most comes first.
    assert found.tile_sequences.tolist() == [2, 1, 2]
    assert found.tile_offsets.tolist() == [TILE_TOKENS, 0, 0]
    wide, narrow = found.groups
    assert wide.block_table[0].tolist() == [0, 1] + [-1] * 15
    assert wide.write_slots[:4].tolist() == [1, 0, 0, 0]
    assert wide.write_offsets[:4].tolist() == [1, 2, 3, 4]
    assert narrow.write_slots[:4].tolist() == [12, 10, 10, 11]
    assert narrow.write_offsets[:4].tolist() == [1, 2, 3, 0]
    assert all(offset * 4 % 16 == 0 for offset in shape.offsets)


def test_drawn_tiles_have_the_last_rows_with_wanted_logits() -> None:
    pieces = [piece(9, 1), piece(2, 3), piece(0, 2 * TILE_TOKENS), piece(0, TILE_TOKENS + 5)]
    pieces[2] = pieces[2]._replace(wants_logits=False)
    found = described(pieces, MetadataShape.of(pieces, GEOMETRIES))
    drawn = found.of_drawn()
    assert (found.shape.tiles, drawn.shape.tiles, drawn.shape.decodes) == (5, 2, 1)
    assert drawn.tile_sequences.tolist() == [3, 1]
    assert drawn.tile_offsets.tolist() == [TILE_TOKENS, 0]
    assert drawn.starts is found.starts
    assert drawn.groups is found.groups


def test_padding_has_no_length_no_blocks_and_nowhere_to_write() -> None:
    shape = MetadataShape.for_decode(4, [3, 5])
    found = described([piece(9, 1), piece(0, 1)], shape)
    assert found.lengths.tolist() == [10, 1, 0, 0]
    assert found.first_rows.tolist() == [0, 1, 2, 3, 4]
    for group in found.groups:
        assert (group.block_table[2:] == -1).all()
        assert group.write_slots[2:].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("pieces", "shape"),
    [
        ([piece(9, 1)] * 3, MetadataShape.for_decode(2, [3, 5])),
        ([piece(9, 1)], MetadataShape.for_decode(2, [1, 5])),
        ([piece(9, 2)], MetadataShape.for_decode(2, [3, 5])),
        ([piece(9, 1)], MetadataShape(0, 1, 1, 1, 1, (3, 5))),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    pieces: list[SequenceSlice], shape: MetadataShape
) -> None:
    with pytest.raises(AttentionInputError, match="expected a batch that fits"):
        describe_step(pieces, GEOMETRIES, shape)


def test_a_vector_of_another_kind_is_refused() -> None:
    shape = MetadataShape.for_decode(2, [3, 5])
    for vector in (
        torch.zeros(shape.total, dtype=torch.int64),
        torch.zeros(shape.total - 1, dtype=torch.int32),
        torch.zeros(2 * shape.total, dtype=torch.int32)[::2],
    ):
        with pytest.raises(AttentionInputError, match="expected step metadata"):
            StepMetadata(shape, vector)


def test_a_decode_batch_is_described_in_place_as_it_is_anew() -> None:
    shape = MetadataShape.for_decode(4, [5, 9])
    vector = describe_padding(shape)
    assert np.array_equal(StepMetadata(shape, torch.from_numpy(vector)).lengths, [0] * 4)
    # More sequences, then fewer and shorter ones: what is left over is never read.
    for starts in ([9, 0, 31, 8], [12, 30], [3]):
        pieces = [piece(start, 1) for start in starts]
        describe_decode(vector, pieces, GEOMETRIES, shape)
        found = StepMetadata(shape, torch.from_numpy(vector))
        expected = described(pieces, shape)
        for name in ("starts", "lengths", "first_rows"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for one, other, geometry in zip(found.groups, expected.groups, GEOMETRIES, strict=True):
            assert torch.equal(one.write_slots, other.write_slots)
            count = len(pieces)
            assert torch.equal(one.write_offsets[:count], other.write_offsets[:count])
            for i, start in enumerate(starts):
                used = start // geometry.tokens_per_block + 1
                assert torch.equal(one.block_table[i, :used], other.block_table[i, :used])


def test_what_a_decode_needs_is_checked() -> None:
    shape = MetadataShape.for_decode(2, [5, 9])
    vector = describe_padding(shape)
    good = [piece(9, 1), piece(20, 1)]
    wide, narrow = good[1].block_tables

    def describe(*tables: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        pieces = [good[0], good[1]._replace(block_tables=tables)]
        describe_decode(vector, pieces, GEOMETRIES, shape)

    stale = narrow.copy()
    stale[:3] = -1  # positions 15 .. 20 are seen: blocks 3 to 5
    describe(wide, stale)
    stale[3] = -1
    with pytest.raises(AttentionInputError, match=r"group 1: expected slots in 0\.\.99"):
        describe(wide, stale)
    with pytest.raises(AttentionInputError, match=r"group 0: expected slots .* got \[100\]"):
        describe(np.array([100, *wide[1:]], np.int32), narrow)
    with pytest.raises(AttentionInputError, match="needs 3 blocks, its block table has 2"):
        describe(wide[:2], narrow)
