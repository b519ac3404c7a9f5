"""Chunks that end on snapshot points, and those that keep a state on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.chunks import Ahead, ChunkRules, Part, next_part

PLAIN = ChunkRules(unit_tokens=64)
MARKED = ChunkRules(unit_tokens=64, alignment_tokens=64)


@pytest.mark.parametrize(
    ("start", "points", "end", "room", "part"),
    [
        (0, (100, 300), 300, 512, Part(100, None)),  # on a point
        (100, (300,), 300, 512, Part(200, None)),  # on a point at the end
        (0, (100,), 300, 512, Part(100, None)),
        (0, (), 300, 512, Part(300, None)),  # at the end
        (0, (290,), 300, 200, Part(192, None)),  # else on a multiple of the unit
        (100, (290,), 300, 100, Part(92, None)),
        (100, (290,), 300, 20, Part(20, None)),  # too little for a unit is used all the same
        (0, (256,), 300, 512, Part(256, None)),
    ],
)
def test_a_chunk_ends_on_a_point_or_at_the_end_or_on_a_multiple_of_the_unit(
    start: int, points: tuple[int, ...], end: int, room: int, part: Part
) -> None:
    assert next_part(Ahead(start, points), end - start, room, PLAIN) == part


@pytest.mark.parametrize(
    ("start", "points", "end", "room", "part"),
    [
        (0, (256,), 300, 512, Part(300, 256)),  # the last point falls into the final chunk
        (0, (256,), 600, 512, Part(256, None)),  # and stops one that is not final
        (0, (193,), 300, 512, Part(193, None)),  # unaligned: it stops the chunk
        (0, (128, 256), 600, 512, Part(256, 128)),  # another one is passed, to the following one
        (0, (128, 256), 600, 200, Part(192, 128)),  # or to a multiple of the unit between
        (0, (128, 256), 600, 150, Part(128, None)),  # where there is one
        (0, (128, 193), 600, 512, Part(193, 128)),  # the following one may lie anywhere
        (0, (193, 256), 600, 512, Part(193, None)),
        (193, (256, 320), 600, 512, Part(63, None)),  # the chunk begins beside the alignment
        (256, (320,), 400, 512, Part(144, 320)),
        (0, (128, 300), 300, 512, Part(300, 128)),
        (0, (300,), 300, 512, Part(300, None)),
    ],
)
def test_a_marked_chunk_passes_one_aligned_point(
    start: int, points: tuple[int, ...], end: int, room: int, part: Part
) -> None:
    assert next_part(Ahead(start, points), end - start, room, MARKED) == part


@given(
    st.integers(1, 400),
    st.sets(st.integers(1, 400), max_size=6),
    st.integers(1, 300),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([None, 16, 64]),
)
def test_no_point_is_passed_without_its_state_and_every_step_goes_on(
    end: int, points: set[int], room: int, unit: int, alignment: int | None
) -> None:
    rules = ChunkRules(unit, alignment)
    left = sorted(point for point in points if point <= end)
    every, start, steps = set(left), 0, 0
    kept: set[int] = set()
    while start < end:
        ahead = Ahead(start, tuple(point for point in left if point > start))
        part = next_part(ahead, end - start, room, rules)
        stop = start + part.tokens
        assert 0 < part.tokens <= room
        assert stop <= end
        passed = [point for point in ahead.points if point < stop]
        assert passed == ([] if part.keep is None else [part.keep])
        if part.keep is not None:
            assert alignment is not None
            assert part.keep % alignment == start % alignment == 0
        assert stop % unit == 0 or stop in every or stop == end or part.tokens < unit
        # The same share, offered exactly, is taken exactly.
        assert next_part(ahead, end - start, part.tokens, rules) == part
        # More room never makes a chunk shorter.
        assert next_part(ahead, end - start, room + 1, rules).tokens >= part.tokens
        kept.update(passed, {stop} & every)
        start, steps = stop, steps + 1
    assert kept == every
    assert steps <= len(every) + -(-end // max(1, room - min(unit, room) + 1)) + end // unit + 1
