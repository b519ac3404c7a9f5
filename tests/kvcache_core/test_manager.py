"""The manager as a whole: replay on another rank, capacity questions, no torch."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from typing_extensions import override

from kvcache_core.hooks import HookError, overrides_hook
from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.pages import DEFAULT_PRIORITY, MIN_PRIORITY
from kvcache_core.priorities import PagePriorities
from kvcache_core.sequence import SequenceCache
from kvcache_core.sizing_demand import SizingDemand
from tests.kvcache_core.support import LAYOUTS, SCOPE, Memory, Rig, plan_of


def replay(layout: str, seed: int) -> list[object]:
    """Random traffic; returns every table and count on the way."""
    rig, chance = Rig(layout, 20), random.Random(seed)
    seen: list[object] = []
    open_sequences: list[SequenceCache] = []
    for _ in range(60):
        if open_sequences and chance.random() < 0.4:
            open_sequences.pop(chance.randrange(len(open_sequences))).close()
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
        sequence = rig.open(tokens)
        if rig.compute(sequence, tokens):
            open_sequences.append(sequence)
        seen.append([sequence.block_table(group).tolist() for group in rig.groups])
        if sequence not in open_sequences:
            sequence.close()
        seen.append(rig.manager.usage())
    return [*seen, rig.memory.copies, rig.manager.counters, *rig.manager.take_events()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_operations_give_the_same_slots(layout: str) -> None:
    assert replay(layout, 7) == replay(layout, 7)


def test_consecutive_blocks_get_consecutive_slots() -> None:
    rig = Rig("full", 64)
    first, second = rig.open([1]), rig.open([2])
    assert first.grow(16)
    assert second.grow(16)
    assert first.block_table(0).tolist() == [0, 1, 2, 3]
    assert second.block_table(0).tolist() == [4, 5, 6, 7]
    assert second.grow(40)
    assert second.block_table(0).tolist() == list(range(4, 14))


def test_can_hold_counts_every_pool_group() -> None:
    rig = Rig("mixed, two pool groups", [10, 7])
    assert rig.manager.can_hold([40])
    assert not rig.manager.can_hold([44])
    assert rig.manager.can_hold([20, 20])
    assert not rig.manager.can_hold([13, 13, 13])


def test_gauges_take_the_scarcest_pool_group() -> None:
    rig = Rig("mixed, two pool groups", [10, 8])
    sequence = rig.run([1] * 24)
    assert (rig.manager.total_blocks(), rig.manager.free_blocks()) == (8, 2)
    assert rig.manager.available_blocks() == 4
    lease = sequence.lease(0, 6)
    assert rig.manager.leased_blocks() == 6
    lease.release()
    sequence.close()
    assert rig.manager.available_blocks() == 8
    assert rig.manager.cached_blocks() == 6
    rig.manager.clear()
    assert (rig.manager.free_blocks(), rig.manager.probe(SCOPE, [1] * 24)) == (8, 0)


def test_slot_counts_must_fit_the_plan() -> None:
    plan = plan_of("mixed, two pool groups")
    with pytest.raises(ValueError, match=r"each of 2 pool groups, got \(4,\)"):
        UnifiedKVCacheManager(plan, [4], Memory(plan, [4, 4]), incarnation="worker@0")


def test_only_storage_loads_torch() -> None:
    code = (
        "import sys, kvcache_core.manager, kvcache_core.index_space\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_k34_the_manager_gives_prompts_their_priorities() -> None:
    """What a declaration says of short prompts holds for every opening, on every rank alike."""
    plan = plan_of("recurrent")
    manager = UnifiedKVCacheManager(
        plan,
        [8, 8],
        Memory(plan, [8, 8]),
        incarnation="",
        low_priority_snapshot_prompt_len=8,
    )
    short, long = [1] * 7, [2] * 8
    for tokens in (short, long):
        sequence = manager.open(SCOPE, tokens, max_match=0)
        assert sequence.grow(len(tokens))
        sequence.advance(len(tokens))
        sequence.commit(tokens)
        sequence.close()
    states = manager._store.pools[1]
    assert sorted(states.priority[states.cached].tolist()) == [MIN_PRIORITY, DEFAULT_PRIORITY]
    explicit = manager.open(SCOPE, short, max_match=0, priorities=PagePriorities(state=7))
    assert explicit.grow(7)


def test_hooks_of_a_subclass_are_what_others_call() -> None:
    class Twice(UnifiedKVCacheManager):
        @classmethod
        @override
        @overrides_hook
        def slots_for(
            cls, plan: LayoutPlan, quota_bytes: int, demand: SizingDemand
        ) -> tuple[int, ...]:
            return super().slots_for(plan, 2 * quota_bytes, demand)

    plan, demand = plan_of("full"), SizingDemand(chunk_tokens=8)
    assert Twice.slots_for(plan, 8192, demand) == plan.slots_for(16384, demand)
    with pytest.raises(HookError, match="quota_bytes"):
        type("Wrong", (Twice,), {"slots_for": classmethod(overrides_hook(lambda cls, plan: ()))})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b34_the_least_pools_count_every_group_of_the_layout(layout: str) -> None:
    """An estimate that took a group for one slot warmed up in pools that no chunk fits into."""
    plan = plan_of(layout)
    demand = SizingDemand(chunk_tokens=16, resident_sequences=2, dummy_sequences=1)
    floor = UnifiedKVCacheManager.floor_slots(plan, demand)
    assert floor == plan.slots_for(plan.pool_bytes(floor), demand)
    with pytest.raises(ValueError, match="holds no full context chunk"):
        plan.slots_for(plan.pool_bytes(floor) - 1, demand)
    rig = Rig(layout, list(floor))
    sequence = rig.open(range(16))
    assert rig.compute(sequence, list(range(16))), "one chunk must fit"
