"""Messages of staged blocks: every block once, in order, and none larger than a buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.costs import TransferCosts, staging_pays
from transfer.staged_cut import (
    device_message_bytes,
    staged_lengths,
    staged_messages,
    staged_pieces,
)
from transfer.staging_buffers import device_staging_bytes

MESSAGE_BYTES = 4 << 20
BLOCK_BYTES = st.one_of(
    st.integers(1, 64),
    st.integers(1 << 16, 3 * MESSAGE_BYTES),
    st.sampled_from([MESSAGE_BYTES // 2, MESSAGE_BYTES]),
)


@given(blocks=st.integers(0, 400), block_bytes=BLOCK_BYTES)
def test_every_block_is_in_one_message_and_messages_fit_a_buffer(
    blocks: int, block_bytes: int
) -> None:
    slots = np.random.default_rng(blocks).permutation(blocks).astype(np.int32)
    lengths = staged_lengths(blocks, block_bytes, MESSAGE_BYTES)
    assert lengths.dtype == np.int32
    assert len(lengths) == staged_messages(blocks, block_bytes, MESSAGE_BYTES)
    pieces = list(staged_pieces(3, slots, lengths, block_bytes, MESSAGE_BYTES))
    assert [slot for piece, _ in pieces for slot in piece.slots] == slots.tolist()
    for piece, size_bytes in pieces:
        assert piece.group == 3
        assert size_bytes == len(piece.slots) * block_bytes
        assert size_bytes <= MESSAGE_BYTES or len(piece.slots) == 1
    if pieces:
        # One message less would not have held them, and no message is a small rest.
        held = max(1, MESSAGE_BYTES // block_bytes)
        assert (len(pieces) - 1) * held < blocks
        assert lengths.max() - lengths.min() <= 1


@pytest.mark.parametrize(
    ("memory_bytes", "message_bytes"),
    [(150 << 30, 128 << 20), (80 << 30, 80 << 20), (25_757 << 20, 25 << 20), (1 << 20, 1 << 20)],
)
def test_messages_of_a_device_are_a_small_part_of_its_memory(
    memory_bytes: int, message_bytes: int
) -> None:
    assert device_message_bytes(memory_bytes) == message_bytes
    assert device_staging_bytes(memory_bytes, 3) == 3 * 4 * message_bytes


@pytest.mark.parametrize("lengths", [[], [1], [2, 0], [3, -1], [1, 1, 1], [2**31 - 1] * 2])
def test_lengths_that_do_not_cut_the_slots_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="message"):
        list(staged_pieces(0, np.array([4, 9], dtype=np.int32), lengths, 8, MESSAGE_BYTES))


def test_a_message_larger_than_a_buffer_is_refused() -> None:
    slots = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="message of 2 blocks, expected 1 to 1"):
        list(staged_pieces(0, slots, [2], MESSAGE_BYTES // 2 + 1, MESSAGE_BYTES))


COSTS = TransferCosts(message_us=10, copy_bytes_per_us=1000)


def test_short_runs_are_staged_and_long_ones_are_not() -> None:
    # A message saved is worth copying 5,000 bytes twice.
    assert staging_pays(101, 1, 490_000, 2, COSTS)
    assert not staging_pays(101, 1, 500_000, 2, COSTS)
    assert staging_pays(23, 3, 99_000, 2, COSTS)
    assert not staging_pays(23, 3, 100_000, 2, COSTS)


def test_an_end_that_copies_nothing_costs_nothing() -> None:
    assert staging_pays(101, 1, 990_000, 1, COSTS)
    assert not staging_pays(101, 1, 1_000_000, 1, COSTS)
    assert staging_pays(2, 1, 1 << 40, 0, COSTS)
    assert not staging_pays(1, 1, 1, 0, COSTS)


def test_a_pass_has_to_be_paid_for_whatever_its_bytes() -> None:
    device = TransferCosts(message_us=70, copy_bytes_per_us=1e6, pass_us=60)
    assert not staging_pays(2, 1, 2, 2, device)
    assert staging_pays(3, 1, 2, 2, device)
    assert not staging_pays(5, 2, 10, 2, device)
    assert staging_pays(6, 2, 10, 2, device)


@given(messages=st.integers(1, 500), staged=st.integers(1, 500), size=st.integers(1, 1 << 34))
def test_more_messages_never_make_runs_the_better_way(
    messages: int, staged: int, size: int
) -> None:
    if staging_pays(messages, staged, size, 2, COSTS):
        assert staging_pays(messages + 1, staged, size, 2, COSTS)
    # One message is never worth a pass, and where messages are free nothing is.
    assert not staging_pays(1, staged, size, 2, COSTS)
    assert not staging_pays(messages, staged, size, 2, TransferCosts(message_us=0))


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes/us"):
        TransferCosts(copy_bytes_per_us=0)
    with pytest.raises(ValueError, match="at least 0 us"):
        TransferCosts(message_us=-1)
    with pytest.raises(ValueError, match="at least 0 us"):
        TransferCosts(pass_us=-1)
