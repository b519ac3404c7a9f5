"""Runs cover every wanted block once and are consecutive on both ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.plan import GroupSide
from transfer.region import Region
from transfer.runs import regions, run_lengths, staging_passes

SIDE = GroupSide(layer_group=3, pool_group=1, slot_bytes=(4, 2))


def permutations(blocks: int) -> st.SearchStrategy[list[int]]:
    """Slots with and without long consecutive stretches."""
    return st.one_of(
        st.permutations(range(blocks)),
        st.integers(0, blocks).map(lambda cut: [*range(cut, blocks), *range(cut)]),
    )


@given(blocks=st.integers(0, 24), data=st.data())
def test_every_slot_byte_moves_exactly_once(blocks: int, data: st.DataObject) -> None:
    ends = [np.array(data.draw(permutations(blocks)), dtype=np.int32) for _ in range(2)]
    lengths = run_lengths(*ends)
    source = np.arange(blocks * 4).reshape(blocks, 4)
    target = np.full((blocks, 4), -1)
    pairs = zip(regions(SIDE, ends[0], lengths), regions(SIDE, ends[1], lengths), strict=True)
    for sent, received in pairs:
        assert (sent.pool_group, sent.pool, sent.num_slots) == (
            1,
            received.pool,
            received.num_slots,
        )
        if sent.pool == 0:
            there = target[received.first_slot : received.first_slot + received.num_slots]
            assert (there == -1).all()
            there[:] = source[sent.first_slot : sent.first_slot + sent.num_slots]
    assert np.array_equal(target[ends[1]], source[ends[0]])


def test_adjacent_blocks_make_one_run_only_where_both_ends_go_on() -> None:
    ours = np.array([4, 5, 6, 9, 10], dtype=np.int32)
    theirs = np.array([1, 2, 7, 8, 9], dtype=np.int32)
    assert run_lengths(ours, theirs).tolist() == [2, 1, 2]
    assert list(regions(SIDE, ours, [2, 1, 2])) == [
        Region(1, 0, 4, 2),
        Region(1, 1, 4, 2),
        Region(1, 0, 6, 1),
        Region(1, 1, 6, 1),
        Region(1, 0, 9, 2),
        Region(1, 1, 9, 2),
    ]


@pytest.mark.parametrize("lengths", [[3], [1], [2, 0], [3, -1], [2**31 - 1, 2**31 - 1]])
def test_lengths_that_do_not_fit_the_slots_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="run"):
        list(regions(SIDE, np.array([4, 5], dtype=np.int32), lengths))


def test_a_run_over_slots_that_are_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="not consecutive"):
        list(regions(SIDE, np.array([4, 6], dtype=np.int32), [2]))


@pytest.mark.parametrize(
    ("pools", "sender", "receiver", "passes"),
    [
        (1, [3, 4, 5], [7, 8, 9], 0),
        (1, [3, 4, 5], [7, 9, 8], 1),
        (1, [3, 5, 6], [7, 8, 9], 1),
        (1, [3, 5, 6], [7, 9, 8], 2),
        (2, [3, 4, 5], [7, 8, 9], 2),
    ],
)
def test_an_end_copies_unless_its_slots_are_the_message(
    pools: int, sender: list[int], receiver: list[int], passes: int
) -> None:
    slots = [np.array(side, dtype=np.int32) for side in (sender, receiver)]
    assert staging_passes(pools, *slots) == passes
