"""Leases pin pages until the last access is over, whatever happens to the sequence."""

from __future__ import annotations

import pytest

from kvcache_core.errors import InvariantViolation
from kvcache_core.events import EVENT_LIMIT, BlocksRemoved, BlocksStored, CacheCleared, EventLog
from kvcache_core.hashing import prefix_keys, root_key
from kvcache_core.lease import LeaseState
from kvcache_core.spec import KVCacheLayerOwner
from tests.kvcache_core.support import BLOCK, SCOPE, Rig

PROMPT = list(range(100, 122))


def test_leased_pages_are_not_evicted_after_close() -> None:
    rig = Rig("full", 8)
    sequence = rig.run(PROMPT)
    lease = sequence.lease(2, 6)
    slots = lease.slots(0).tolist()
    assert slots == sequence.block_table(0)[2:6].tolist()
    sequence.close()
    assert rig.manager.leased_blocks() == 4
    assert rig.manager.available_blocks() == 4
    other = rig.open([1])
    assert not other.grow(5 * BLOCK)
    assert other.grow(4 * BLOCK)
    assert not set(other.block_table(0).tolist()) & set(slots)
    rig.manager.check()
    lease.release()
    assert lease.state is LeaseState.RELEASED
    rig.manager.check()
    other.close()
    assert rig.manager.available_blocks() == 8


def test_a_lease_is_released_once() -> None:
    rig = Rig("full", 8)
    lease = rig.run(PROMPT).lease(0, 2)
    lease.release()
    with pytest.raises(InvariantViolation, match="released only once"):
        lease.release()
    with pytest.raises(InvariantViolation, match="only an active lease"):
        lease.quarantine()


def test_two_leases_on_one_page() -> None:
    rig = Rig("full", 8)
    sequence = rig.open(PROMPT)
    assert sequence.grow(8)
    first, second = sequence.lease(0, 2), sequence.lease(1, 2)
    sequence.close()
    assert rig.manager.leased_blocks() == 2
    first.release()
    assert (rig.manager.leased_blocks(), rig.manager.free_blocks()) == (1, 7)
    second.release()
    assert rig.manager.free_blocks() == 8
    rig.manager.check()


def test_quarantine_keeps_pages_out_of_circulation() -> None:
    rig = Rig("full", 8)
    sequence = rig.run(PROMPT)
    lease = sequence.lease(4, 6)
    sequence.close()
    lease.quarantine()
    rig.manager.check()
    assert rig.manager.quarantined_blocks() == 2
    assert rig.manager.probe(SCOPE, PROMPT) == 16
    assert rig.manager.available_blocks() == 6
    rig.manager.clear()
    assert (rig.manager.free_blocks(), rig.manager.quarantined_blocks()) == (6, 2)
    lease.release()
    rig.manager.check()
    assert (rig.manager.free_blocks(), rig.manager.quarantined_blocks()) == (8, 0)
    assert rig.manager.counters.leases_quarantined == 1


def test_quarantine_below_an_open_sequence_stops_its_publishing_only() -> None:
    rig = Rig("full", 16)
    sequence = rig.run(PROMPT)
    sequence.lease(0, 1).quarantine()
    rig.manager.check()
    longer = [*PROMPT, *range(9)]
    assert rig.compute(sequence, longer)
    rig.verify(sequence, longer)
    rig.manager.check()
    sequence.close()
    rig.manager.check()
    assert rig.manager.free_blocks() == 15


def test_events_tell_what_can_be_matched() -> None:
    rig = Rig("full", 6)
    sequence = rig.open(PROMPT)
    assert sequence.grow(10)
    sequence.advance(10)
    sequence.commit(PROMPT[:10])
    keys = prefix_keys(SCOPE, PROMPT, BLOCK)
    assert rig.compute(sequence, PROMPT)
    sequence.close()
    rig.cache([1] * 16)
    rig.manager.clear()
    events = rig.manager.take_events()
    assert [event.sequence for event in events] == list(range(len(events)))
    assert {event.incarnation for event in events} == {"worker@0"}
    first, second, removed, third, cleared = events
    assert isinstance(first, BlocksStored)
    assert (first.parent, first.keys) == (root_key(SCOPE), tuple(keys[:2]))
    assert isinstance(second, BlocksStored)
    assert (second.parent, second.keys) == (keys[1], tuple(keys[2:5]))
    assert isinstance(removed, BlocksRemoved)
    assert removed.keys == tuple(reversed(keys[2:5]))
    assert isinstance(third, BlocksStored)
    assert isinstance(cleared, CacheCleared)
    assert rig.manager.take_events() == []
    counters = rig.manager.counters
    assert (counters.blocks_stored, counters.blocks_removed) == (9, 3)


def test_a_full_event_log_shows_as_a_gap() -> None:
    log = EventLog("worker@0")
    for _ in range(EVENT_LIMIT + 2):
        log.cleared()
    assert log.take()[0].sequence == 2


def test_counters_are_exact() -> None:
    rig = Rig("full", 16)
    rig.cache(PROMPT)
    rig.run([*PROMPT, 1, 2]).close()
    assert not rig.open([3]).grow(17 * BLOCK)
    counters = rig.manager.counters
    assert (counters.sequences_opened, counters.sequences_closed) == (3, 2)
    assert (counters.queried_tokens, counters.matched_tokens) == (21 + 23, 22)
    assert (counters.partial_matches, counters.pages_copied) == (1, 1)
    assert (counters.pages_created, counters.pages_evicted) == (7, 0)
    assert counters.grows_refused == 1
    usage = rig.manager.usage()[0]
    assert (usage.total, usage.free, usage.cached) == (16, 10, 6)
    assert (usage.available, usage.unavailable) == (16, 0)


def test_b57_draft_pages_in_pools_of_their_own_travel_with_the_target() -> None:
    """Draft layers that share no pool with the target are leased and published like its pages."""
    rig = Rig("optional draft", 16)
    sequence = rig.run(PROMPT)
    plan = rig.plan
    assert len({group.pool_group for group in plan.layer_groups}) == 2
    lease = sequence.lease(0, sequence.blocks)
    drafts = [view for view in plan.views if view.owner is KVCacheLayerOwner.DRAFT]
    assert {view.pool_group for view in drafts} == {0, 1}
    for view in drafts:
        table = sequence.block_table(view.layer_group)
        assert lease.slots(view.id).tolist() == table.tolist()
        assert (table >= 0).any()
    lease.release()
    sequence.close()
    again = rig.open([*PROMPT, 1])
    assert set(again.reused_groups) == set(rig.groups)
    again.close()
