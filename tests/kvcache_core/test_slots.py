"""The allocator: every slot once, consecutive where possible, deterministic."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvcache_core.errors import InvariantViolation
from kvcache_core.slots import SlotAllocator


def give(allocator: SlotAllocator, slots: Iterable[int]) -> None:
    allocator.give(np.array(list(slots), dtype=np.int32))


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 40),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 100)), max_size=60),
)
def test_equals_a_set_of_free_slots(size: int, steps: list[tuple[int, int]]) -> None:
    allocator, twin = SlotAllocator(size), SlotAllocator(size)
    free, taken = set(range(size)), list[int]()
    for count, choice in steps:
        if choice % 2 and taken:
            start = choice % len(taken)
            given = taken[start : start + 1 + count]
            del taken[start : start + 1 + count]
            give(allocator, given)
            give(twin, reversed(given))
            free |= set(given)
        elif count <= len(free):
            after = taken[-1] if taken else None
            slots = allocator.take(count, after).tolist()
            assert twin.take(count, after).tolist() == slots
            assert len(set(slots)) == count
            assert set(slots) <= free
            free -= set(slots)
            taken += slots
        runs = allocator.runs()
        assert {slot for start, end in runs for slot in range(start, end)} == free
        assert all(left[1] < right[0] for left, right in pairwise(runs))
        assert allocator.free == len(free)


def test_follows_the_last_slot() -> None:
    allocator = SlotAllocator(20)
    first = allocator.take(4).tolist()
    assert allocator.take(3, after=first[-1]).tolist() == [4, 5, 6]


def test_takes_the_longest_run_when_the_next_slot_is_taken() -> None:
    allocator = SlotAllocator(20)
    allocator.take(20)
    give(allocator, (1, 2, 3, 10, 11, 12, 13, 14, 18))
    assert allocator.take(6, after=5).tolist() == [10, 11, 12, 13, 14, 1]
    with pytest.raises(InvariantViolation, match="asked for 4 slots, 3 are free"):
        allocator.take(4)


def test_many_small_changes_keep_the_heap_small() -> None:
    allocator = SlotAllocator(64)
    for _ in range(2000):
        for slot in allocator.take(8).tolist():
            give(allocator, [slot])
    assert allocator.take(64).tolist() == list(range(64))


def test_a_slot_is_given_once() -> None:
    allocator = SlotAllocator(8)
    taken = allocator.take(4)
    allocator.give(taken)
    with pytest.raises(InvariantViolation, match="slot 0 is free already"):
        allocator.give(taken)


def test_numbers_may_begin_anywhere() -> None:
    allocator = SlotAllocator(4, first=10)
    assert allocator.take(4).tolist() == [10, 11, 12, 13]
