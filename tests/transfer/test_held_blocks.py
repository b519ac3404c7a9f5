"""Which blocks move, by ordinals of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvcache_core.life_cycle import LifeCycle, LifeCycleKind
from kvcache_core.spec import ReusePolicy
from transfer.held_blocks import ALL_BLOCKS, HeldBlocks, block_pairs

FULL = replace(ALL_BLOCKS, tokens_per_block=8)


def windowed(window: int, sink_blocks: int = 0) -> HeldBlocks:
    """A windowed group of 8-token blocks."""
    life_cycle = LifeCycle(LifeCycleKind.ATTENTION, window, sink_blocks, ReusePolicy.REQUIRED)
    return replace(FULL, life_cycle=life_cycle)


STATE = replace(FULL, life_cycle=LifeCycle(LifeCycleKind.STATE, None, 0, ReusePolicy.REQUIRED))


def test_context_parallel_ranks_take_turns() -> None:
    pairs = [
        block_pairs(FULL, replace(FULL, cp_size=3, cp_rank=rank), (1, 8), 64) for rank in range(3)
    ]
    assert [each.ordinals.tolist() for each in pairs] == [[3, 6], [1, 4, 7], [2, 5]]
    assert [each.sender_positions.tolist() for each in pairs] == [[3, 6], [1, 4, 7], [2, 5]]
    assert [each.receiver_positions.tolist() for each in pairs] == [[1, 2], [0, 1, 2], [0, 1]]


def test_blocks_return_from_context_parallel_ranks() -> None:
    pairs = block_pairs(replace(FULL, cp_size=3, cp_rank=1), FULL, (0, 8), 64)
    assert pairs.sender_positions.tolist() == [0, 1, 2]
    assert pairs.receiver_positions.tolist() == [1, 4, 7]


def test_a_rank_may_get_no_block_at_all() -> None:
    pairs = block_pairs(FULL, replace(FULL, cp_size=8, cp_rank=5), (0, 2), 16)
    assert pairs.ordinals.tolist() == []
    assert pairs.receiver_positions.dtype == np.int32


@pytest.mark.parametrize(
    ("window", "sinks", "prompt", "expected"),
    [
        (8, 0, 39, [4]),
        (8, 0, 40, [4]),
        (9, 0, 40, [4]),
        (10, 0, 40, [3, 4]),
        (17, 1, 40, [0, 3, 4]),
        (17, 9, 40, [0, 1, 2, 3, 4]),
        (100, 0, 40, [0, 1, 2, 3, 4]),
    ],
)
def test_of_a_window_only_live_blocks_move(
    window: int, sinks: int, prompt: int, expected: list[int]
) -> None:
    held = windowed(window, sinks)
    assert block_pairs(held, held, (0, 5), prompt).ordinals.tolist() == expected
    assert block_pairs(held, held, (4, 5), prompt).ordinals.tolist() == [4]


def test_a_window_that_covers_the_longest_sequence_of_one_side_is_none_there() -> None:
    assert block_pairs(FULL, windowed(10), (0, 5), 40).ordinals.tolist() == [3, 4]
    assert block_pairs(windowed(40), FULL, (0, 5), 39).ordinals.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="window of 10 tokens has passed 3 blocks"):
        block_pairs(windowed(10), FULL, (0, 5), 40)


def test_a_state_moves_with_the_last_block() -> None:
    for span, expected in (((0, 4), []), ((4, 5), [4]), ((0, 5), [4]), ((5, 5), [])):
        pairs = block_pairs(STATE, replace(STATE, cp_size=2, cp_rank=1), span, 40)
        assert pairs.ordinals.tolist() == expected
        assert pairs.receiver_positions.tolist() == [0] * len(expected)


def test_chunks_add_up() -> None:
    held = replace(windowed(17, 1), cp_size=2, cp_rank=1)
    for middle in range(6):
        moved = [
            ordinal
            for span in ((0, middle), (middle, 5))
            for ordinal in block_pairs(FULL, held, span, 40).ordinals.tolist()
        ]
        assert moved == block_pairs(FULL, held, (0, 5), 40).ordinals.tolist() == [3]


@pytest.mark.parametrize("span", [(0, 6), (3, 2), (-1, 2)])
def test_blocks_outside_the_prompt_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not within the 5 blocks of a prompt of 40 tokens"):
        block_pairs(FULL, FULL, span, 40)
