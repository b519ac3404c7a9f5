"""Copies of few and large rows: right, and made without the interpreter's lock.

Budget: 1 s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.copy_plan import CopyPlan
from transfer.host_copies import LEAST_ROW_BYTES, ROWS_WITHOUT_THE_LOCK, HostCopies, row_pieces
from transfer.plan import Fragment, GroupPlan, GroupSide

RUN_BYTES = 64 << 10
RUNS = 72
"""Keys and values of 36 layers."""
BLOCKS = 3
REPEATS = 20
HALF_OF_THE_HEADS = CopyPlan.of(
    GroupPlan(
        GroupSide(0, 0, (RUNS * RUN_BYTES,)),
        GroupSide(0, 0, (2 * RUNS * RUN_BYTES,)),
        tuple(
            Fragment(0, run * RUN_BYTES, 0, 2 * run * RUN_BYTES, RUN_BYTES) for run in range(RUNS)
        ),
    )
)
"""From one of two ranks of an 8B-class model to one of one."""


@given(rows=st.integers(1, 2048), row_bytes=st.integers(1, 1 << 20))
def test_rows_are_cut_until_there_are_enough_or_no_cut_is_left(rows: int, row_bytes: int) -> None:
    pieces = row_pieces(rows, row_bytes)
    assert row_bytes % pieces == 0
    assert pieces == 1 or rows * pieces // 2 < ROWS_WITHOUT_THE_LOCK
    assert pieces == 1 or row_bytes // pieces >= LEAST_ROW_BYTES
    odd, small = (row_bytes // pieces) % 2, row_bytes // pieces < 2 * LEAST_ROW_BYTES
    assert rows * pieces >= ROWS_WITHOUT_THE_LOCK or odd or small


@pytest.fixture(scope="module")
def message() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Of :data:`BLOCKS` blocks."""
    words = np.random.default_rng(7).integers(0, 1 << 62, BLOCKS * RUNS * RUN_BYTES // 8)
    return words.view(np.uint8)


def test_large_rows_arrive_whole(message: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    pool = np.zeros((5, 2 * RUNS * RUN_BYTES), dtype=np.uint8)
    slots = np.array([4, 0, 2], dtype=np.int32)
    HostCopies().scatter(HALF_OF_THE_HEADS, message, [pool], slots)
    runs = pool.reshape(5, RUNS, 2, RUN_BYTES)
    assert np.array_equal(runs[slots, :, 0].reshape(-1), message)
    assert not runs[:, :, 1].any()
    assert not runs[[1, 3]].any()
    gathered = np.empty_like(message)
    back = CopyPlan.of(
        GroupPlan(
            GroupSide(0, 0, (2 * RUNS * RUN_BYTES,)),
            GroupSide(0, 0, (RUNS * RUN_BYTES,)),
            tuple(
                Fragment(0, 2 * run * RUN_BYTES, 0, run * RUN_BYTES, RUN_BYTES)
                for run in range(RUNS)
            ),
        )
    )
    HostCopies().gather(back, [pool], slots, gathered)
    assert np.array_equal(gathered, message)


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_other_threads_go_on_meanwhile(
    way: str, message: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    copies, plan = HostCopies(), HALF_OF_THE_HEADS
    slots = np.arange(BLOCKS, dtype=np.int32)
    pool = np.zeros((BLOCKS, 2 * RUNS * RUN_BYTES), dtype=np.uint8)
    if way == "scatter":
        turns = _turns_of_others(lambda: copies.scatter(plan, message, [pool], slots))
    else:
        sources = message.reshape(BLOCKS, -1)
        gathered = np.empty_like(message)
        turns = _turns_of_others(lambda: copies.gather(plan, [sources], slots, gathered))
    # With the lock held there is a turn between two copies and none during one: 0.6 a copy, not 80.
    assert turns > 4 * REPEATS


def _turns_of_others(work: Callable[[], None]) -> int:
    """How often another thread went round while ``work`` was done some times."""
    started, over = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        for _ in range(REPEATS):
            work()
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    turns = 0
    while not over.is_set():
        time.sleep(0)  # Lets go of the lock, whoever wants it.
        turns += 1
    thread.join()
    return turns
