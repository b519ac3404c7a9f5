"""Runs of a block as units, and copies that touch nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core.spec import ElementType
from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.page_values import Bytes
from transfer.copy_plan import CopyPlan, PageCopies
from transfer.host_copies import HostCopies
from transfer.plan import Fragment, GroupPlan, GroupSide, TransferPlan

COPIES: PageCopies[Bytes] = HostCopies()
PLAN = CopyPlan.of(
    GroupPlan(
        GroupSide(0, 0, (10,)),
        GroupSide(0, 0, (4, 8)),
        (Fragment(0, 6, 0, 2, 2), Fragment(0, 2, 0, 0, 2), Fragment(0, 0, 1, 4, 2)),
    )
)
"""Of slots of ten bytes 2-3 and 6-7 go to the first pool of the receiver, 0-1 to the second."""


def only_group(sender: Side, receiver: Side, layers: tuple[Attention, ...]) -> GroupPlan:
    """The one group that rank 0 of either side have in common."""
    pair = same_model(sender, receiver, layers, tokens_per_block=64)
    (group,) = TransferPlan.between(pair.senders(0)[0], pair.receivers(0)[0]).groups
    return group


LARGE = tuple(Attention(8, head_dim=128) for _ in range(36))
WHOLE = Side(stages=(36,))


@pytest.mark.parametrize(
    ("receiver", "unit_tokens"),
    [(Side(tp=2, stages=(36,)), 4 * 64), (Side(stages=(36,), page_tokens=32), 32)],
    ids=["half of the heads", "smaller pages"],
)
def test_units_are_the_runs_of_a_large_model(receiver: Side, unit_tokens: int) -> None:
    group = only_group(WHOLE, receiver, LARGE)
    (part,) = CopyPlan.of(group).parts
    assert part.unit_bytes == unit_tokens * 128 * 2
    assert part.block_bytes == group.block_bytes == group.receiver.block_bytes
    assert np.array_equal(np.sort(part.receiver.units), np.arange(part.receiver.slot_units))
    assert (np.diff(part.sender.units) > 0).all()


def test_every_pair_of_pools_is_a_part_with_its_own_unit() -> None:
    packed = (Attention(4, head_dim=64, dtype=ElementType.PACKED4),)
    group = only_group(Side(), Side(tp=2), packed)
    data, scales = CopyPlan.of(group).parts
    assert (data.sender.pool, data.receiver.pool) == (0, 0)
    assert (scales.sender.pool, scales.receiver.pool) == (1, 1)
    # Two heads of 64 tokens: 64 elements of four bits each, or 32 scales of a byte.
    assert (data.unit_bytes, scales.unit_bytes) == (2 * 64 * 32, 2 * 64 * 32)


def test_a_unit_divides_the_offsets_of_both_ends() -> None:
    sides = GroupSide(0, 0, (8,)), GroupSide(0, 0, (8,))
    for sender, receiver in ((0, 2), (2, 0), (4, 2)):
        (part,) = CopyPlan.of(GroupPlan(*sides, (Fragment(0, sender, 0, receiver, 4),))).parts
        assert part.unit_bytes == 2
        assert part.sender.units.tolist() == [sender // 2, sender // 2 + 1]
        assert part.receiver.units.tolist() == [receiver // 2, receiver // 2 + 1]


def test_gather_and_scatter_touch_their_runs_only() -> None:
    pool = np.arange(40, dtype=np.uint8).reshape(4, 10)
    message = np.empty(2 * 6, dtype=np.uint8)
    COPIES.gather(PLAN, [pool], np.array([3, 1], dtype=np.int32), message)
    assert message.tolist() == [32, 33, 36, 37, 12, 13, 16, 17, 30, 31, 10, 11]
    targets = [np.zeros((3, 4), dtype=np.uint8), np.zeros((3, 8), dtype=np.uint8)]
    COPIES.scatter(PLAN, message, targets, np.array([0, 2], dtype=np.int32))
    assert targets[0].tolist() == [[32, 33, 36, 37], [0] * 4, [12, 13, 16, 17]]
    assert targets[1].tolist() == [[0, 0, 0, 0, 30, 31, 0, 0], [0] * 8, [0, 0, 0, 0, 10, 11, 0, 0]]


PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=8
)


@given(pieces=PIECES, step=st.sampled_from([1, 4]), order=st.randoms(use_true_random=False))
def test_both_passes_equal_a_copy_of_every_fragment(
    pieces: list[tuple[int, int, int]], step: int, order: Random
) -> None:
    # Gaps and sizes in steps; the receiver has the same pieces in another order.
    starts, ends = {}, [8, 8]
    for number, (gap, _, size) in enumerate(pieces):
        starts[number] = ends[0] + gap * step
        ends[0] = starts[number] + size * step
    fragments = []
    for number in order.sample(range(len(pieces)), len(pieces)):
        _, gap, size = pieces[number]
        place = ends[1] + gap * step
        ends[1] = place + size * step
        fragments.append(Fragment(0, starts[number], 0, place, size * step))
    group = GroupPlan(GroupSide(0, 0, (ends[0],)), GroupSide(0, 0, (ends[1],)), tuple(fragments))
    plan = CopyPlan.of(group)
    pool = np.arange(1, 1 + 2 * ends[0], dtype=np.uint8).reshape(2, ends[0])
    target = np.zeros((3, ends[1]), dtype=np.uint8)
    message = np.empty(2 * plan.block_bytes, dtype=np.uint8)
    COPIES.gather(plan, [pool], np.array([1, 0], dtype=np.int32), message)
    COPIES.scatter(plan, message, [target], np.array([0, 2], dtype=np.int32))
    expected = np.zeros_like(target)
    for piece in fragments:
        here = slice(piece.sender_offset_bytes, piece.sender_offset_bytes + piece.size_bytes)
        there = slice(piece.receiver_offset_bytes, piece.receiver_offset_bytes + piece.size_bytes)
        expected[[0, 2], there] = pool[[1, 0], here]
    assert np.array_equal(target, expected)


def test_no_blocks_are_an_empty_message() -> None:
    none = np.empty(0, dtype=np.int32)
    message = np.empty(0, dtype=np.uint8)
    COPIES.gather(PLAN, [np.zeros((1, 10), dtype=np.uint8)], none, message)
    pools = [np.zeros((1, 4), dtype=np.uint8), np.zeros((1, 8), dtype=np.uint8)]
    COPIES.scatter(PLAN, message, pools, none)


@pytest.mark.parametrize(
    ("slots", "message_bytes", "slot_bytes", "said"),
    [
        ([0, 4], 12, 10, "pool 0 has 4 slots, got slots from 0 to 4"),
        ([-1, 0], 12, 10, "pool 0 has 4 slots, got slots from -1 to 0"),
        ([0, 1], 11, 10, "message of 2 blocks: expected 12 contiguous bytes"),
        ([0, 1], 12, 8, "pool 0: expected contiguous slots of 10 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    slots: list[int], message_bytes: int, slot_bytes: int, said: str
) -> None:
    message = np.ones(message_bytes, dtype=np.uint8)
    numbers = np.array(slots, dtype=np.int32)
    with pytest.raises(ValueError, match=said):
        COPIES.gather(PLAN, [np.zeros((4, slot_bytes), dtype=np.uint8)], numbers, message)
    assert message.all()


def test_scatter_checks_all_pools_first() -> None:
    pools = [np.zeros((4, 4), dtype=np.uint8), np.zeros((2, 8), dtype=np.uint8)]
    message = np.ones(12, dtype=np.uint8)
    with pytest.raises(ValueError, match="pool 1 has 2 slots"):
        COPIES.scatter(PLAN, message, pools, np.array([0, 3], dtype=np.int32))
    with pytest.raises(ValueError, match="strides"):
        COPIES.scatter(PLAN, np.ones(24, np.uint8)[::2], pools, np.array([0, 1], dtype=np.int32))
    assert not pools[0].any()
