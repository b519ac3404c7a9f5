"""Sliding windows, sinks, receiving and the drafter policies."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcache_core.life_cycle import LifeCycle, LifeCycleKind
from kvcache_core.spec import ReusePolicy
from tests.kvcache_core.support import BLOCK, SCOPE, Rig

PROMPT = list(range(100, 140))  # ten blocks


@given(
    history=st.integers(0, 300),
    window=st.integers(1, 100),
    sinks=st.integers(0, 5),
    size=st.integers(1, 17),
)
def test_stale_range_equals_what_no_later_token_sees(
    history: int, window: int, sinks: int, size: int
) -> None:
    cycle = LifeCycle(LifeCycleKind.ATTENTION, window, sinks, ReusePolicy.REQUIRED)
    start, end = cycle.stale_range(history, size)
    for block in range(history // size + 2):
        last = block * size + size - 1
        is_visible = last > history - window or block < sinks
        assert (start <= block < end) == (not is_visible)


@given(
    window=st.integers(1, 40),
    append=st.integers(1, 30),
    sinks=st.integers(0, 3),
    size=st.integers(1, 9),
    steps=st.integers(1, 12),
)
def test_most_live_blocks_is_never_exceeded(
    window: int, append: int, sinks: int, size: int, steps: int
) -> None:
    cycle = LifeCycle(LifeCycleKind.ATTENTION, window, sinks, ReusePolicy.REQUIRED)
    most = cycle.most_live_blocks(append, size)
    for history in range(0, steps * append, append):
        committed = history // size * size
        assert cycle.live_blocks(history + append, committed, size) <= most


def test_windowed_blocks_are_dropped_once_committed() -> None:
    rig = Rig("mixed, one pool group", 64)
    sequence = rig.open(PROMPT)
    assert sequence.grow(20)
    for group in rig.groups:
        rig.memory.write(sequence, PROMPT, 0, 20, group)
    sequence.advance(20)
    assert -1 not in sequence.block_table(1)
    sequence.commit(PROMPT[:20])
    # window 6: the token at 20 sees 15..20, so blocks 0..2 (tokens 0..11) are stale
    assert (sequence.block_table(1) == -1).tolist() == [True, True, True, False, False]
    assert -1 not in sequence.block_table(0)
    rig.manager.check()
    assert rig.manager.cached_blocks() == 3


def test_long_sequence_lives_in_a_small_windowed_pool() -> None:
    rig = Rig("windows only", 14)
    sequence = rig.open([])
    tokens: list[int] = []
    for step in range(100):
        tokens.append(step)
        assert rig.compute(sequence, tokens)
    rig.verify(sequence, tokens)
    rig.manager.check()
    sequence.close()
    assert rig.manager.available_blocks() == 14


def test_sinks_stay() -> None:
    rig = Rig("sinks", 64)
    sequence = rig.run(PROMPT)
    stale = (sequence.block_table(1) == -1).tolist()
    # five sink tokens: two blocks; window 6 at 40: token 35 and later, so block 8 and later
    assert stale == [False, False, *[True] * 6, False, False]
    rig.verify(sequence, PROMPT)


def test_match_needs_the_last_window() -> None:
    """The windowed pages of the common part are gone, so the match must fall back."""
    rig = Rig("mixed, two pool groups", 16)
    rig.cache(PROMPT)
    branch = [*PROMPT[:21], 1, 2, 3]
    assert rig.manager.probe(SCOPE, branch) == 21
    rig.manager.clear()
    sequence = rig.open(PROMPT)
    assert sequence.grow_to_receive(40)
    for group in rig.groups:
        rig.memory.write(sequence, PROMPT, 0, 40, group)
    sequence.advance(40)
    sequence.commit(PROMPT)
    sequence.close()
    assert rig.manager.probe(SCOPE, branch) == 0
    assert rig.manager.probe(SCOPE, [*PROMPT, 1]) == 40
    rig.manager.check()


def test_receiving_takes_no_pages_for_stale_blocks() -> None:
    rig = Rig("mixed, two pool groups", 12)
    sequence = rig.open(PROMPT)
    assert sequence.grow_to_receive(40)
    stale = (sequence.block_table(1) == -1).tolist()
    assert stale == [*[True] * 8, False, False]
    lease = sequence.lease(0, 10)
    view = next(view for view in rig.plan.views if view.layer_group == 1)
    assert lease.slots(view.id).tolist() == sequence.block_table(1).tolist()
    for group in rig.groups:
        rig.memory.write(sequence, PROMPT, 0, 40, group)
    sequence.advance(40)
    sequence.commit(PROMPT)
    lease.release()
    rig.verify(sequence, PROMPT)
    assert rig.compute(sequence, [*PROMPT, 1])
    rig.manager.check()


def test_computing_after_all_instead_of_receiving_fills_the_holes() -> None:
    rig = Rig("mixed, two pool groups", 12)
    sequence = rig.open(PROMPT)
    assert sequence.grow_to_receive(40)
    assert rig.compute(sequence, PROMPT)
    rig.verify(sequence, PROMPT)
    rig.manager.check()


def test_optional_draft_does_not_shorten_the_match() -> None:
    rig = Rig("optional draft", 64)
    sequence = rig.open(PROMPT)
    sequence.close()
    rig.cache(PROMPT)
    again = rig.open([*PROMPT, 1])
    assert again.matched_tokens == 40
    assert set(again.reused_groups) == {0, 1, 2}
    again.decline(1)
    assert set(again.reused_groups) == {0, 2}
    assert -1 not in again.block_table(0)
    with pytest.raises(ValueError, match="not OPTIONAL"):
        again.decline(0)
    assert again.grow(41)
    assert (again.block_table(1) != -1).tolist() == [*[False] * 8, *[True] * 3]
    assert rig.memory.copies == []
    rig.manager.check()


def test_incomplete_optional_draft_is_reported_and_rebuilt() -> None:
    rig = Rig("optional draft", 64)
    sequence = rig.open(PROMPT)
    assert sequence.grow_to_receive(40)
    for group in rig.groups:
        rig.memory.write(sequence, PROMPT, 0, 40, group)
    sequence.advance(40)
    sequence.commit(PROMPT)
    sequence.close()
    branch = rig.open([*PROMPT[:22], 1, 2, 3])
    assert branch.matched_tokens == 22
    assert set(branch.reused_groups) == {0, 2}
    tokens = [*PROMPT[:22], *range(8)]
    assert rig.compute(branch, tokens)
    rig.verify(branch, tokens)
    branch.close()
    rig.manager.check()
    # the drafter's pages of blocks that the match covered were rebuilt, not published
    assert set(rig.open(tokens, max_match=30).reused_groups) == {0, 1, 2}
    assert set(rig.open(tokens, max_match=25).reused_groups) == {0, 2}


def test_private_pages_are_neither_published_nor_leased() -> None:
    rig = Rig("private draft", 64)
    rig.cache(PROMPT)
    assert rig.manager.cached_blocks() == 10
    sequence = rig.open([*PROMPT, 1])
    assert sequence.matched_tokens == 40
    assert sequence.block_table(1).tolist() == [-1] * 10
    child = sequence.fork()
    assert child is not None
    assert child.grow(41)
    assert -1 not in child.block_table(1)
    child.close()
    assert sequence.grow(41)
    assert -1 not in sequence.block_table(1)
    lease = sequence.lease(0, 11)
    assert [rig.plan.views[view].layer_group for view in lease.views] == [0]
    rig.manager.check()


def test_recurrent_state_matches_only_at_its_snapshot() -> None:
    rig = Rig("recurrent", 64)
    rig.cache(PROMPT[:22])
    assert rig.manager.probe(SCOPE, PROMPT) == 22
    assert rig.manager.probe(SCOPE, PROMPT[:21]) == 0
    sequence = rig.open(PROMPT)
    shared = int(sequence.block_table(1)[0])
    assert rig.compute(sequence, PROMPT)
    assert int(sequence.block_table(1)[0]) != shared
    rig.verify(sequence, PROMPT)
    sequence.close()
    assert rig.manager.probe(SCOPE, [*PROMPT[:22], 1]) == 22
    assert rig.manager.probe(SCOPE, [*PROMPT, 1]) == 40


def test_state_beyond_the_committed_tokens_is_not_published() -> None:
    rig = Rig("recurrent", 64)
    for committed in (20, 22):
        sequence = rig.open(PROMPT, max_match=0)
        assert sequence.grow(24)
        for group in rig.groups:
            rig.memory.write(sequence, PROMPT, 0, 24, group)
        sequence.advance(24)
        sequence.commit(PROMPT[:committed])
        sequence.close()
        rig.manager.check()
        assert rig.manager.probe(SCOPE, PROMPT) == 0


def test_pending_snapshot_is_published_at_any_length() -> None:
    rig = Rig("recurrent", 64)
    sequence = rig.open(PROMPT)
    for end in (BLOCK * 3, 18):
        assert sequence.grow(end)
        slot = sequence.acquire_snapshot_slot()
        assert slot is not None
        assert sequence.acquire_snapshot_slot() == slot
        for group in rig.groups:
            rig.memory.write(sequence, PROMPT, sequence.history, end, group)
        rig.memory.content[1][slot][0] = tuple(PROMPT[:end])
        sequence.advance(end)
        assert sequence.commit_with_snapshot(PROMPT[sequence.committed : end])
        rig.manager.check()
    for end in (12, 18):
        assert rig.manager.probe(SCOPE, [*PROMPT[:end], 1]) == end
        branch = rig.open([*PROMPT[:end], 1])
        rig.verify(branch, PROMPT)
        branch.close()
    assert rig.compute(sequence, PROMPT)  # the snapshot has pages of its own
    branch = rig.open([*PROMPT[:18], 1])
    rig.verify(branch, PROMPT)
    branch.close()
    sequence.close()
    rig.manager.check()
