"""Recurrent states: snapshots at exact lengths, pending ones, and what they are worth."""

from __future__ import annotations

import pytest

from kvcache_core.errors import InvariantViolation
from kvcache_core.pages import DEFAULT_PRIORITY, MIN_PRIORITY
from kvcache_core.priorities import PagePriorities
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ReusePolicy
from tests.kvcache_core.support import BLOCK, SCOPE, Rig, layer, state_layer
from tests.kvcache_core.test_core_rows_reuse import SpecRig

PROMPT = list(range(100, 140))  # ten blocks


def state_rig(slots: int = 64, host_slots: int = 0) -> SpecRig:
    """One attention and one recurrent layer, in two pool groups."""
    return SpecRig([layer(0), state_layer(1)], slots, host_slots)


def write_to(rig: Rig, sequence: SequenceCache, tokens: list[int], slot: int | None = None) -> None:
    """Compute ``tokens`` to their end, the state also into ``slot``; do not commit."""
    for group in rig.groups:
        rig.memory.write(sequence, tokens, sequence.history, len(tokens), group)
    if slot is not None:
        rig.memory.content[1][slot][0] = tuple(tokens)
    sequence.advance(len(tokens))


def states_cached(rig: Rig) -> int:
    return rig.manager.usage()[1].cached


@pytest.mark.parametrize("end", [8, 13, 15, 16])
def test_k32_a_state_is_reused_at_its_exact_length_only(end: int) -> None:
    rig = state_rig()
    rig.cache(PROMPT[:end])
    assert rig.manager.probe(SCOPE, PROMPT) == end
    assert rig.manager.probe(SCOPE, PROMPT[: end - 1]) == 0
    assert rig.open(PROMPT, max_match=end - 1).matched_tokens == 0
    assert rig.manager.probe(SCOPE, [*PROMPT[: end - 1], 1, 2]) == 0


def test_k32_a_sequence_has_one_slot_whatever_its_length_and_the_last_of_a_pool_serves() -> None:
    rig = SpecRig([layer(0), state_layer(1)], slots=3)
    sequences = [rig.run([number] * BLOCK) for number in range(3)]
    slots = [int(sequence.block_table(1)[0]) for sequence in sequences]
    assert sorted(slots) == [0, 1, 2]
    for number, sequence in enumerate(sequences):
        rig.verify(sequence, [number] * BLOCK)
    assert not rig.open([9]).grow(1)
    rig.manager.check()


def test_k32_a_matched_state_is_copied_before_it_is_written() -> None:
    rig = state_rig()
    rig.cache(PROMPT[:13])
    first, second = rig.open(PROMPT), rig.open([*PROMPT[:13], 1, 2])
    assert rig.compute(first, PROMPT)
    assert rig.compute(second, [*PROMPT[:13], 1, 2])
    rig.verify(first, PROMPT)
    rig.verify(second, [*PROMPT[:13], 1, 2])
    assert rig.manager.probe(SCOPE, PROMPT[:13]) == 13


def test_k32_a_snapshot_inside_a_block_is_found_when_the_tree_knows_the_prompt_beyond_it() -> None:
    """A turn that is generated again: its prompt is known to its end, states stand inside blocks
    before it.
    """
    rig = state_rig()
    rig.cache(PROMPT[:13])
    rig.cache(PROMPT)
    assert rig.manager.probe(SCOPE, PROMPT[:39]) == 13
    again = rig.open(PROMPT[:39])
    assert again.matched_tokens == 13
    rig.verify(again, PROMPT)
    assert rig.compute(again, PROMPT[:39])
    rig.verify(again, PROMPT[:39])
    rig.manager.check()


def test_k33_a_pending_slot_is_private_until_its_commit_and_the_trees_then() -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(13)
    slot = sequence.acquire_snapshot_slot()
    assert slot is not None
    assert slot != sequence.block_table(1)[0]
    assert (sequence.acquire_snapshot_slot(), sequence.pending_snapshot_slot) == (slot, slot)
    write_to(rig, sequence, PROMPT[:13], slot)
    assert rig.manager.probe(SCOPE, PROMPT) == 0
    assert sequence.commit_with_snapshot(PROMPT[:13])
    assert sequence.pending_snapshot_slot is None
    assert rig.manager.probe(SCOPE, PROMPT) == 13
    rig.manager.check()
    branch = rig.open([*PROMPT[:13], 1])
    assert int(branch.block_table(1)[0]) == slot
    rig.verify(branch, PROMPT)
    assert rig.manager.counters.snapshots_recorded == 1


@pytest.mark.parametrize("end", [7, 12])
def test_k33_the_snapshot_gets_the_priority_of_cached_states(end: int) -> None:
    rig = state_rig()
    sequence = rig.manager.open(SCOPE, PROMPT, max_match=0, priorities=PagePriorities(state=7))
    assert sequence.grow(end)
    slot = sequence.acquire_snapshot_slot()
    assert slot is not None
    write_to(rig, sequence, PROMPT[:end], slot)
    assert sequence.commit_with_snapshot(PROMPT[:end])
    assert rig.manager._store.pools[1].priority[slot] == 7
    assert states_cached(rig) == 1


@pytest.mark.parametrize("end", [7, 12])
def test_k33_the_live_state_is_kept_as_a_copy_and_the_sequence_goes_on(end: int) -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(end)
    write_to(rig, sequence, PROMPT[:end])
    live = int(sequence.block_table(1)[0])
    assert sequence.acquire_snapshot_slot() is not None
    assert sequence.commit_with_live_snapshot(PROMPT[:end])
    assert sequence.pending_snapshot_slot is None
    assert int(sequence.block_table(1)[0]) == live
    rig.manager.check()
    assert rig.compute(sequence, PROMPT)
    branch = rig.open([*PROMPT[:end], 1, 2])
    assert branch.matched_tokens == end
    rig.verify(branch, PROMPT)
    rig.verify(sequence, PROMPT)
    assert rig.manager.counters.snapshots_recorded == 1


def test_k33_a_live_state_without_a_slot_for_its_copy_is_committed_without() -> None:
    rig = SpecRig([layer(0), state_layer(1)], slots=3)
    holders = [rig.open([number]) for number in range(2)]
    assert all(holder.grow(1) for holder in holders)
    sequence = rig.open(PROMPT)
    assert sequence.grow(4)
    write_to(rig, sequence, PROMPT[:4])
    with pytest.raises(ValueError, match="that of 4 tokens, got 3"):
        sequence.commit_with_live_snapshot(PROMPT[:3])
    assert not sequence.commit_with_live_snapshot(PROMPT[:4])
    assert (sequence.committed, rig.manager.counters.snapshots_skipped) == (4, 1)
    rig.manager.check()


@pytest.mark.parametrize("way", ["suspend", "close", "release"])
def test_k33_a_pending_slot_is_released_with_the_sequence(way: str) -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    assert sequence.acquire_snapshot_slot() is not None
    before = rig.manager.usage()[1].unavailable
    {
        "suspend": sequence.suspend,
        "close": sequence.close,
        "release": sequence.release_snapshot_slot,
    }[way]()
    rig.manager.check()
    assert sequence.pending_snapshot_slot is None
    assert rig.manager.usage()[1].unavailable == before - (1 if way == "release" else 2)
    if way == "release":
        sequence.release_snapshot_slot()


def test_k33_a_commit_that_records_nothing_releases_the_slot() -> None:
    """Another sequence has left the state at this length; publishing has stopped; no room."""
    rig = state_rig()
    first, second = rig.open(PROMPT), rig.open(PROMPT)
    for index, sequence in enumerate((first, second)):
        for end in (8, 13):
            assert sequence.grow(end)
            slot = sequence.acquire_snapshot_slot()
            assert slot is not None
            write_to(rig, sequence, PROMPT[:end], slot)
            recorded = sequence.commit_with_snapshot(PROMPT[sequence.committed : end])
            assert recorded == (index == 0)
            assert sequence.pending_snapshot_slot is None
            rig.manager.check()
    assert states_cached(rig) == 2
    counters = rig.manager.counters
    assert (counters.snapshots_recorded, counters.snapshots_skipped) == (2, 2)


def test_k33_a_commit_after_the_tree_was_emptied_releases_the_slot() -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    slot = sequence.acquire_snapshot_slot()
    write_to(rig, sequence, PROMPT[:8], slot)
    rig.manager.clear()
    assert not sequence.commit_with_snapshot(PROMPT[:8])
    assert sequence.pending_snapshot_slot is None
    assert sequence.acquire_snapshot_slot() is None  # it will never be published
    rig.manager.check()
    assert rig.manager.usage()[1].unavailable == 1


def test_k33_a_commit_that_raises_releases_the_slot() -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    assert sequence.acquire_snapshot_slot() is not None
    with pytest.raises(ValueError, match="not final"):
        sequence.commit_with_snapshot(PROMPT[:8])
    assert sequence.pending_snapshot_slot is None
    rig.manager.check()
    assert sequence.grow(9)
    slot = sequence.acquire_snapshot_slot()
    write_to(rig, sequence, PROMPT[:9], slot)
    rig.memory.fail_copies = True  # the attention page of the partial block cannot be copied
    with pytest.raises(OSError, match="copy engine"):
        sequence.commit_with_snapshot(PROMPT[:9])
    rig.memory.fail_copies = False
    assert sequence.pending_snapshot_slot is None
    rig.manager.check()
    assert rig.manager.usage()[1].unavailable == 1


def test_k33_a_commit_without_a_snapshot_keeps_the_slot_for_the_next_one() -> None:
    rig = state_rig()
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    slot = sequence.acquire_snapshot_slot()
    write_to(rig, sequence, PROMPT[:4])
    sequence.commit(PROMPT[:4])
    assert sequence.pending_snapshot_slot == slot
    write_to(rig, sequence, PROMPT[:8], slot)
    assert sequence.commit_with_snapshot(PROMPT[4:8])
    rig.manager.check()


def test_k33_nothing_pending_and_other_layouts_are_errors() -> None:
    rig = state_rig()
    with pytest.raises(InvariantViolation, match="no pending snapshot"):
        rig.run(PROMPT[:8]).commit_with_snapshot([])
    for specs in (
        [layer(0)],
        [layer(0), state_layer(1, ReusePolicy.PRIVATE)],
        [layer(0), state_layer(1), state_layer(2, ReusePolicy.OPTIONAL)],
    ):
        sequence = SpecRig(specs).open(PROMPT)
        with pytest.raises(InvariantViolation, match="one shared recurrent group"):
            sequence.acquire_snapshot_slot()


def test_k33_no_slot_when_nothing_is_free_or_evictable() -> None:
    rig = SpecRig([layer(0), state_layer(1)], slots=4)
    sequences = [rig.run([number]) for number in range(4)]
    assert sequences[0].acquire_snapshot_slot() is None
    assert sequences[0].pending_snapshot_slot is None
    sequences[1].close()  # its state is cached: it makes room
    assert sequences[0].acquire_snapshot_slot() is not None
    rig.manager.check()


def test_k34_states_of_short_prompts_are_worth_least() -> None:
    short = PagePriorities.of_prompt(99, 100)
    assert (short.attention, short.state) == (DEFAULT_PRIORITY, MIN_PRIORITY)
    for tokens, limit in ((100, 100), (1, 0)):
        assert PagePriorities.of_prompt(tokens, limit) == PagePriorities()
    with pytest.raises(ValueError, match=r"state priority must be in 0\.\.100, got -1"):
        PagePriorities(state=-1)


def serve(rig: Rig, tokens: list[int], limit: int) -> None:
    """Compute and close, with the priorities of a prompt of this length."""
    priorities = PagePriorities.of_prompt(len(tokens), limit)
    sequence = rig.manager.open(SCOPE, tokens, max_match=0, priorities=priorities)
    assert rig.compute(sequence, tokens)
    sequence.close()


@pytest.mark.parametrize(("limit", "lost"), [(20, "short"), (0, "long")])
def test_k34_snapshots_of_short_prompts_are_evicted_before_older_ones_of_long_prompts(
    limit: int, lost: str
) -> None:
    rig = SpecRig([layer(0), state_layer(1)], slots=12)
    long, short = PROMPT[:24], [1] * 8
    serve(rig, long, limit)
    serve(rig, short, limit)
    for number in range(2, 6):
        serve(rig, [number], limit)  # six states, all of them cached
    held = [rig.open([9, number], max_match=0) for number in range(7)]
    for sequence in held[:6]:
        assert sequence.grow(0)
    assert rig.manager.usage()[1].free == 0
    assert held[6].grow(0)
    rig.manager.check()
    reused = {name: rig.manager.probe(SCOPE, p) for name, p in (("long", long), ("short", short))}
    assert reused == {"long": 24, "short": 8, lost: 0}


def test_k34_a_long_prompt_that_reuses_a_short_ones_snapshot_raises_its_worth() -> None:
    rig = state_rig()
    serve(rig, PROMPT[:8], 20)
    rig.open(PROMPT).close()
    node = rig.manager._store.tree.walk(rig.manager.prompt(SCOPE, PROMPT), 2)[-1]
    page = rig.manager._store.tree.pages[1, node]
    assert rig.manager._store.pools[1].priority[page] == DEFAULT_PRIORITY


def test_k34_attention_pages_keep_their_own_priority() -> None:
    rig = state_rig()
    serve(rig, PROMPT[:8], 20)
    pools = rig.manager._store.pools
    assert set(pools[0].priority[pools[0].cached].tolist()) == {DEFAULT_PRIORITY}
    assert set(pools[1].priority[pools[1].cached].tolist()) == {MIN_PRIORITY}


def test_k34_a_low_priority_snapshot_does_not_push_others_off_the_host() -> None:
    rig = SpecRig([layer(0), state_layer(1)], slots=4, host_slots=2)
    for tokens, limit in (([1] * 3, 0), ([2] * 3, 0), ([3] * 3, 100)):
        serve(rig, tokens, limit)
        if tokens == [1] * 3:
            continue
        held = [rig.open([9, number], max_match=0) for number in range(4)]
        assert all(sequence.grow(0) for sequence in held)  # every device state is needed
        assert rig.manager.usage()[1].host_cached == 2
        for sequence in held:
            sequence.close()
    assert [rig.manager.probe(SCOPE, [number] * 3) for number in (1, 2, 3)] == [3, 3, 0]
    rig.manager.check()
