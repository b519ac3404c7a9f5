"""The allocator: every slot once, consecutive where possible, deterministic."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvcache_core.errors import InvariantViolation
from kvcache_core.slots import SlotAllocator


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
            slot = taken.pop(choice % len(taken))
            allocator.give(slot)
            twin.give(slot)
            free.add(slot)
        elif count <= len(free):
            after = taken[-1] if taken else None
            slots = allocator.take(count, after)
            assert twin.take(count, after) == slots
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
    first = allocator.take(4)
    assert allocator.take(3, after=first[-1]) == [4, 5, 6]


def test_takes_the_longest_run_when_the_next_slot_is_taken() -> None:
    allocator = SlotAllocator(20)
    allocator.take(20)
    for slot in (1, 2, 3, 10, 11, 12, 13, 14, 18):
        allocator.give(slot)
    assert allocator.take(6, after=5) == [10, 11, 12, 13, 14, 1]
    with pytest.raises(InvariantViolation, match="asked for 4 slots, 3 are free"):
        allocator.take(4)


def test_many_small_changes_keep_the_heap_small() -> None:
    allocator = SlotAllocator(64)
    for _ in range(2000):
        for slot in allocator.take(8):
            allocator.give(slot)
    assert allocator.take(64) == list(range(64))
