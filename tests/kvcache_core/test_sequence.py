"""What one sequence may rely on: sharing, growing, committing, forking, suspending."""

from __future__ import annotations

import pytest

from kvcache_core.errors import InvariantViolation
from tests.kvcache_core.support import LAYOUTS, SCOPE, Rig

PROMPT = list(range(100, 122))  # 22 tokens: five full blocks of 4 and half of a sixth


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_request_reuses_the_first_ones_pages(layout: str) -> None:
    rig = Rig(layout, 64)
    rig.cache(PROMPT)
    longer = [*PROMPT, 7, 8]
    sequence = rig.open(longer)
    assert sequence.matched_tokens == len(PROMPT) == rig.manager.probe(SCOPE, longer)
    assert rig.compute(sequence, longer)
    rig.manager.check()
    rig.verify(sequence, longer)
    sequence.close()
    rig.manager.check()
    assert rig.manager.available_blocks() == 64


def test_match_inside_a_block_is_copied_once_at_the_first_grow() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    sequence = rig.open(PROMPT)
    assert (sequence.matched_tokens, sequence.capacity) == (21, 21)
    shared = int(sequence.block_table(0)[5])
    assert rig.memory.copies == []
    assert sequence.grow(22)
    private = int(sequence.block_table(0)[5])
    assert rig.memory.copies == [(0, shared, private)]
    assert private != shared
    assert sequence.grow(24)
    assert len(rig.memory.copies) == 1
    rig.manager.check()


def test_match_that_ends_at_a_block_boundary_copies_nothing() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    sequence = rig.open([*PROMPT[:20], 1, 2])
    assert sequence.matched_tokens == 20
    assert sequence.grow(22)
    assert rig.memory.copies == []


def test_match_is_capped_inside_a_full_block() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    sequence = rig.open(PROMPT[:20])
    assert sequence.matched_tokens == 19
    assert rig.compute(sequence, PROMPT[:20])
    rig.verify(sequence, PROMPT[:20])
    rig.manager.check()


def test_scopes_do_not_share() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    assert rig.manager.probe(b"other salt", PROMPT) == 0
    assert rig.manager.open(b"other salt", PROMPT, max_match=21).matched_tokens == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refused_grow_changes_nothing(layout: str) -> None:
    rig = Rig(layout, 12)
    blocker = rig.run(PROMPT[:8])
    sequence = rig.open([1, 2, 3])
    before = rig.manager.usage()
    assert not sequence.grow(200)
    assert rig.manager.usage() == before
    assert (sequence.capacity, sequence.blocks) == (0, 0)
    rig.manager.check()
    assert rig.compute(sequence, [1, 2, 3])
    sequence.close()
    blocker.close()
    rig.manager.check()
    assert rig.manager.available_blocks() == 12


def test_refused_grow_evicts_nothing() -> None:
    rig = Rig("mixed, two pool groups", 8)
    rig.cache(PROMPT)
    holder = rig.run([1] * 4)
    assert not rig.open([5]).grow(8 * 4)
    assert rig.manager.probe(SCOPE, PROMPT) == len(PROMPT)
    holder.close()


def test_failed_copy_rolls_back() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    sequence = rig.open(PROMPT)
    before, table = rig.manager.usage(), sequence.block_table(0).tolist()
    rig.memory.fail_copies = True
    with pytest.raises(OSError, match="copy engine"):
        sequence.grow(30)
    rig.manager.check()
    assert rig.manager.usage() == before
    assert sequence.block_table(0).tolist() == table
    rig.memory.fail_copies = False
    assert sequence.grow(30)
    rig.manager.check()


def test_two_that_computed_the_same_end_up_on_one_page() -> None:
    rig = Rig("full", 32)
    first, second = rig.open(PROMPT), rig.open(PROMPT)
    assert rig.compute(first, PROMPT)
    assert rig.compute(second, PROMPT)
    assert first.block_table(0)[:5].tolist() == second.block_table(0)[:5].tolist()
    assert first.block_table(0)[5] != second.block_table(0)[5]
    assert rig.manager.counters.pages_rebased == 5
    rig.manager.check()
    rig.verify(second, PROMPT)
    first.close()
    second.close()
    rig.manager.check()
    assert rig.manager.cached_blocks() == 6


def test_table_is_the_same_array_until_it_grows() -> None:
    rig = Rig("full", 32)
    sequence = rig.run(PROMPT)
    table = sequence.block_table(0)
    assert sequence.grow(24)
    assert sequence.block_table(0) is table
    assert not table.flags.writeable
    assert sequence.grow(25)
    assert len(sequence.block_table(0)) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fork_shares_full_blocks_and_copies_the_partial_one(layout: str) -> None:
    rig = Rig(layout, 64)
    parent = rig.run(PROMPT)
    child = parent.fork()
    assert child is not None
    rig.manager.check()
    mine, theirs = parent.block_table(0).tolist(), child.block_table(0).tolist()
    assert mine[:5] == theirs[:5]
    assert mine[5] != theirs[5]
    left, right = [*PROMPT, 1, 2, 3], [*PROMPT, 4, 5, 6]
    assert rig.compute(parent, left)
    assert rig.compute(child, right)
    rig.verify(parent, left)
    rig.verify(child, right)
    rig.manager.check()
    parent.close()
    rig.verify(child, right)
    child.close()
    rig.manager.check()
    assert rig.manager.available_blocks() == 64


def test_fork_without_a_page_gives_none() -> None:
    rig = Rig("full", 6)
    parent = rig.run(PROMPT)
    assert parent.fork() is None
    rig.manager.check()
    aligned = Rig("full", 5).run(PROMPT[:20])
    assert aligned.fork() is not None


def test_rewound_blocks_that_a_fork_shares_are_copied() -> None:
    rig = Rig("full", 32)
    parent = rig.open(PROMPT)
    assert parent.grow(12)
    rig.memory.write(parent, PROMPT, 0, 12, 0)
    parent.advance(12)
    child = parent.fork()
    assert child is not None
    parent.rewind(6)
    other = [*PROMPT[:6], *range(1, 9)]
    assert rig.compute(parent, other)
    rig.verify(parent, other)
    child.commit(PROMPT[:12])
    rig.verify(child, PROMPT)
    rig.manager.check()


def test_rewind_then_commit_equals_fresh() -> None:
    rig = Rig("full", 32)
    sequence = rig.run(PROMPT)
    draft = [*PROMPT, 9, 9, 9, 9]
    assert sequence.grow(26)
    rig.memory.write(sequence, draft, 22, 26, 0)
    sequence.advance(26)
    sequence.rewind(23)
    final = [*PROMPT, 9, 1, 2, 3, 4]
    assert rig.compute(sequence, final)
    rig.verify(sequence, final)
    sequence.close()
    fresh = Rig("full", 32)
    fresh.cache(final)
    for query in (final, draft, PROMPT):
        assert rig.manager.probe(SCOPE, query) == fresh.manager.probe(SCOPE, query)


def test_suspended_pages_can_be_evicted_and_recomputed() -> None:
    rig = Rig("full", 8)
    sequence = rig.run(PROMPT)
    sequence.suspend()
    rig.manager.check()
    assert rig.manager.available_blocks() == 8
    other = rig.run([1] * 20)
    assert not sequence.resume()
    rig.manager.check()
    other.close()
    assert sequence.resume()
    rig.manager.check()
    assert sequence.history == sequence.committed < 22
    assert sequence.capacity >= 22
    assert rig.compute(sequence, PROMPT)
    rig.verify(sequence, PROMPT)
    sequence.close()


def test_resume_without_pressure_loses_nothing() -> None:
    rig = Rig("mixed, one pool group", 32)
    sequence = rig.run(PROMPT)
    sequence.suspend()
    assert sequence.resume()
    assert sequence.history == 22
    rig.verify(sequence, PROMPT)


def test_wrong_extents_are_refused() -> None:
    rig = Rig("full", 32)
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    with pytest.raises(ValueError, match=r"advance within 0\.\.8, got 9"):
        sequence.advance(9)
    sequence.advance(6)
    with pytest.raises(ValueError, match="not final"):
        sequence.commit(PROMPT[:7])
    sequence.commit(PROMPT[:5])
    with pytest.raises(ValueError, match=r"rewind within 5\.\.6, got 4"):
        sequence.rewind(4)
    with pytest.raises(ValueError, match="below the history"):
        sequence.grow(5)
    with pytest.raises(ValueError, match="not within"):
        sequence.lease(0, 3)


def test_a_closed_sequence_is_over() -> None:
    rig = Rig("full", 8)
    sequence = rig.run([1, 2, 3])
    sequence.close()
    with pytest.raises(InvariantViolation, match="closed only once"):
        sequence.close()
    with pytest.raises(InvariantViolation, match="closed"):
        sequence.grow(3)
    with pytest.raises(InvariantViolation, match="suspended"):
        rig.open([1]).resume()


def test_uncommitted_tokens_are_not_published() -> None:
    rig = Rig("full", 8)
    sequence = rig.open(PROMPT)
    assert sequence.grow(20)
    sequence.advance(20)
    sequence.close()
    assert rig.manager.probe(SCOPE, PROMPT) == 0
    assert rig.manager.free_blocks() == 8


def test_matched_tail_that_was_never_committed_is_not_published_again() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    sequence = rig.open([*PROMPT, 5])
    assert sequence.grow_to_receive(30)
    sequence.close()
    rig.manager.check()
    assert rig.manager.cached_blocks() == 6


def test_tail_that_a_transfer_may_be_writing_is_not_published() -> None:
    rig = Rig("full", 8)
    rig.cache(PROMPT)
    receiving = rig.open([*PROMPT, 5])
    assert receiving.grow_to_receive(24)
    assert rig.open([1]).grow(2 * 4)
    assert rig.manager.probe(SCOPE, PROMPT) == 20
    receiving.close()
    rig.manager.check()
    assert rig.manager.probe(SCOPE, PROMPT) == 20
