"""Who may write a page, who goes on waiting, what a failure leaves: the rules between sequences."""

from __future__ import annotations

import pytest

from kvcache_core.events import EVENT_LIMIT, CacheCleared, EventLog
from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.pages import DEFAULT_PRIORITY
from kvcache_core.priorities import PagePriorities
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ReusePolicy
from tests.kvcache_core.support import BLOCK, SCOPE, Memory, Rig, layer, state_layer

PROMPT = list(range(100, 122))  # five full blocks of 4 and half of a sixth


def run_with(rig: Rig, tokens: list[int], priorities: PagePriorities) -> SequenceCache:
    """Compute ``tokens`` without reuse."""
    sequence = rig.manager.open(SCOPE, tokens, max_match=0, priorities=priorities)
    assert rig.compute(sequence, tokens)
    return sequence


@pytest.mark.parametrize("forgotten", ["covered", "cleared"])
def test_a_page_that_a_transfer_reads_is_not_written_by_who_matched_it(forgotten: str) -> None:
    """The tree forgets a partial block while a lease is on it and one sequence has matched it."""
    rig = Rig("full", 16)
    first = rig.run(PROMPT)
    lease = first.lease(5, 6)
    slot = int(lease.slots(0)[0])
    first.close()
    second = rig.open([*PROMPT[:21], 7, 8])
    assert second.matched_tokens == 21
    if forgotten == "cleared":
        rig.manager.clear()
    else:
        rig.cache([*PROMPT, 1, 2, 3])  # its full block covers the partial one
    seen = list(rig.memory.content[0][slot])
    assert rig.compute(second, [*PROMPT[:21], 7, 8])
    assert rig.memory.content[0][slot] == seen
    rig.verify(second, [*PROMPT[:21], 7, 8])
    lease.release()
    second.close()
    rig.manager.check()


def test_declined_states_get_a_page_of_their_own_when_the_last_slot_is_private() -> None:
    """NO_PAGE is -1, which as an index is the last slot of the pool."""
    specs = [layer(0), state_layer(1, ReusePolicy.OPTIONAL)]
    plan = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
    states = next(group for group in plan.layer_groups if group.life_cycle.is_state)
    counts = [5 if number == states.pool_group else 20 for number in range(len(plan.pool_groups))]
    memory = Memory(plan, counts)
    manager = UnifiedKVCacheManager(plan, counts, memory, incarnation="worker@0")
    first = manager.open(SCOPE, PROMPT[:8], max_match=0)
    assert first.grow(8)
    first.advance(8)
    first.commit(PROMPT[:8])
    first.close()
    others = [manager.open(SCOPE, [other], max_match=0) for other in range(3)]
    assert all(other.grow(1) for other in others)
    assert manager.usage()[states.pool_group].free == 1
    again = manager.open(SCOPE, [*PROMPT[:8], 1], max_match=8)
    assert again.matched_tokens == 8
    again.decline(states.id)
    others.append(manager.open(SCOPE, [9], max_match=0))
    assert others[-1].grow(1)
    assert others[-1].block_table(states.id)[0] == 4
    others[0].close()
    assert again.grow(9)
    assert again.block_table(states.id)[0] >= 0
    manager.check()


def test_announced_blocks_of_a_cleared_cache_are_not_waited_for() -> None:
    rig = Rig("full", 32)
    sequence = rig.open(PROMPT)
    sequence.announce(rig.manager.prompt(SCOPE, PROMPT))
    assert rig.manager.look(rig.manager.prompt(SCOPE, PROMPT)).in_flight_tokens == 20
    rig.manager.clear()
    assert sequence.grow(8)
    sequence.advance(8)
    sequence.commit(PROMPT[:8])
    rig.cache(PROMPT[:8])
    assert rig.manager.look(rig.manager.prompt(SCOPE, PROMPT)).in_flight_tokens == 0
    rig.manager.check()


def test_capacity_counts_no_slot_of_padding_rows() -> None:
    rig = Rig("full", 6)
    assert rig.manager.can_hold([6 * BLOCK])
    rig.manager.dummy_slots()
    assert not rig.manager.can_hold([6 * BLOCK])
    assert rig.manager.can_hold([5 * BLOCK])


def test_a_page_shared_at_commit_takes_the_higher_priority() -> None:
    rig = Rig("full", 12)
    run_with(rig, [1] * 8, PagePriorities(attention=0)).close()
    run_with(rig, [1] * 8, PagePriorities(attention=90)).close()
    assert rig.manager.counters.pages_rebased == 2
    rig.cache([2] * 16)
    rig.cache([3] * 40)
    assert rig.manager.probe(SCOPE, [1] * 8) == 8


def test_a_page_that_replaces_one_on_the_host_keeps_its_priority() -> None:
    rig = Rig("full", 8, host_slots=4)
    run_with(rig, [1] * 8, PagePriorities(attention=90)).close()
    rig.cache([2] * 32)
    assert rig.manager.look(rig.manager.prompt(SCOPE, [1] * 8)).host_tokens == 8
    run_with(rig, [1] * 8, PagePriorities(attention=DEFAULT_PRIORITY)).close()
    assert rig.manager.look(rig.manager.prompt(SCOPE, [1] * 8)).host_tokens == 0
    for other in (3, 4):
        run_with(rig, [other] * 24, PagePriorities(attention=60)).close()
    found = rig.manager.look(rig.manager.prompt(SCOPE, [1] * 8))
    assert (found.reusable_tokens, found.host_tokens) == (8, 0)
    rig.manager.check()


def test_a_cold_page_does_not_push_a_worthier_one_off_the_host() -> None:
    rig = Rig("full", 4, host_slots=4)
    run_with(rig, [1] * 16, PagePriorities(attention=90)).close()
    run_with(rig, [2] * 16, PagePriorities(attention=10)).close()
    assert rig.manager.usage()[0].host_cached == 4
    rig.cache([3] * 16)
    assert rig.manager.probe(SCOPE, [1] * 16) == 16
    assert rig.manager.probe(SCOPE, [2] * 16) == 0
    rig.manager.check()


def test_host_hits_are_counted_once_however_often_a_resume_is_tried() -> None:
    rig = Rig("full", 6, host_slots=6)
    sequence = rig.run([1] * 16)
    sequence.suspend()
    other = rig.run([2] * 24)
    before = rig.manager.counters.host_matched_tokens
    assert not sequence.resume()
    assert not sequence.resume()
    other.close()
    assert sequence.resume()
    assert rig.manager.counters.host_matched_tokens == before
    rig.verify(sequence, [1] * 16)


def test_a_resume_whose_copy_fails_leaves_the_sequence_suspended() -> None:
    rig = Rig("full", 6, host_slots=6)
    sequence = rig.run([1] * 18)
    sequence.suspend()
    rig.cache([2] * 24)
    rig.memory.fail_copies = True
    with pytest.raises(OSError, match="copy engine"):
        sequence.resume()
    assert sequence.is_suspended
    assert (sequence.committed, sequence.history) == (18, 18)
    rig.manager.check()
    rig.memory.fail_copies = False
    assert sequence.resume()
    rig.verify(sequence, [1] * 18)
    rig.manager.check()


def test_the_truth_fits_the_log_however_many_chains_it_has() -> None:
    log = EventLog("worker@0")
    log.begin_truth()
    for chain in range(EVENT_LIMIT + 5):
        log.stored(b"root", [chain.to_bytes(4, "little")])
    log.end_truth()
    log.removed([b"x"])
    events = log.take()
    assert isinstance(events[0], CacheCleared)
    assert len(events) == EVENT_LIMIT + 7
    for _ in range(EVENT_LIMIT + 2):
        log.cleared()
    assert len(log.take()) == EVENT_LIMIT


def test_resume_waits_while_too_much_is_in_use() -> None:
    """Section 2.4: not above the watermark, whatever would fit."""
    plan = Rig("full", 1).plan
    memory = Memory(plan, [100])
    manager = UnifiedKVCacheManager(
        plan, [100], memory, incarnation="worker@0", resume_watermark=0.97
    )
    sequence = manager.open(SCOPE, PROMPT, max_match=0)
    assert sequence.grow(1)
    sequence.suspend()
    busy = manager.open(SCOPE, [5], max_match=0)
    assert busy.grow(98 * BLOCK)
    assert not sequence.resume()
    assert sequence.is_suspended
    busy.close()
    busy = manager.open(SCOPE, [5], max_match=0)
    assert busy.grow(97 * BLOCK)
    assert sequence.resume()
    manager.check()
    with pytest.raises(ValueError, match=r"resume_watermark.*got 0"):
        UnifiedKVCacheManager(plan, [100], memory, incarnation="a", resume_watermark=0.0)


def test_resume_does_not_wait_by_default() -> None:
    rig = Rig("full", 100)
    sequence = rig.run([1] * 4)
    sequence.suspend()
    assert rig.open([5]).grow(99 * BLOCK)
    assert sequence.resume()


def test_commit_onto_a_block_that_lies_on_the_host_brings_it_back_for_nothing() -> None:
    """The device page at hand takes the place of the host's; nobody copies."""
    rig = Rig("full", 6, host_slots=6)
    first = rig.open([1] * 16, max_match=0)  # opened before the blocks are known
    rig.cache([1] * 16)
    rig.cache([2] * 24)
    assert rig.manager.usage()[0].host_cached == 4
    assert rig.compute(first, [1] * 16)
    assert rig.memory.onboarded == []
    again = rig.open([1] * 17)
    assert again.is_resident
    assert again.block_table(0).tolist() == first.block_table(0).tolist()
    rig.verify(again, [1] * 17)
    rig.manager.check()


def test_two_that_match_a_host_page_both_get_its_bytes() -> None:
    rig = Rig("full", 10, host_slots=6)
    rig.cache([1] * 16)
    rig.cache([2] * 40)
    first, second = rig.open([1] * 17), rig.open([1] * 17)
    assert not first.is_resident
    assert first.block_table(0).tolist() == [-1] * 4
    assert first.prefetch()
    rig.verify(first, [1] * 17)
    assert rig.compute(second, [1] * 17)
    rig.verify(second, [1] * 17)
    rig.manager.check()
    first.close()
    second.close()
    assert rig.manager.probe(SCOPE, [1] * 17) == 17
    rig.manager.check()
    assert rig.manager.available_blocks() == 10


def test_what_is_written_again_after_a_rewind_goes_past_the_page_a_transfer_reads() -> None:
    rig = Rig("full", 16)
    sequence = rig.open(PROMPT, max_match=0)
    assert sequence.grow(12)
    rig.memory.write(sequence, PROMPT, 0, 12, 0)
    sequence.advance(12)
    sequence.commit(PROMPT[:5])
    lease = sequence.lease(0, 3)
    slots = lease.slots(0).tolist()
    seen = [list(rig.memory.content[0][slot]) for slot in slots]
    sequence.rewind(7)
    other = [*PROMPT[:7], *range(10)]
    assert rig.compute(sequence, other)
    assert [list(rig.memory.content[0][slot]) for slot in slots] == seen
    rig.verify(sequence, other)
    rig.manager.check()
    lease.release()
    sequence.rewind(17)
    assert sequence.grow(18)
    table = sequence.block_table(0).tolist()
    sequence.advance(18)
    sequence.rewind(17)
    assert sequence.grow(18)
    assert sequence.block_table(0).tolist() == table
