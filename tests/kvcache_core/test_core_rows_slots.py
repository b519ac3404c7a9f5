"""Dummy slots, rows of requests, reports, and facts that have one source."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import kvcache_core
from kvcache_core.branch_choice import BranchChoice
from kvcache_core.branch_points import branch_point
from kvcache_core.counters_report import CountersReport
from kvcache_core.errors import InvariantViolation
from kvcache_core.layout import LayoutPlan
from kvcache_core.request_slots import RequestSlots, RequestSlotsExhausted
from kvcache_core.reuse import Reuse
from kvcache_core.spec import ReusePolicy
from tests.kvcache_core.support import BLOCK, DRAFT, LAYOUTS, SCOPE, Rig, layer, state_layer
from tests.kvcache_core.test_core_rows_reuse import SpecRig
from tests.kvcache_core.test_core_rows_states import state_rig, write_to

PROMPT = list(range(100, 140))  # ten blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k22_dummy_slots_are_made_once(layout: str) -> None:
    """Restated: there is no second manager to make them twice; asking again changes nothing."""
    rig = Rig(layout, 12)
    first = rig.manager.dummy_slots()
    used = rig.manager.usage()
    assert rig.manager.dummy_slots() == first
    assert rig.manager.usage() == used
    assert len(first) == len(rig.plan.pool_groups)
    assert all(usage.free == 11 for usage in used)
    rig.manager.check()


def test_b59_padding_rows_of_target_and_drafter_share_the_dummy_of_their_pool() -> None:
    rig = SpecRig([layer(0), layer(1, owner=DRAFT, policy=ReusePolicy.OPTIONAL)], slots=8)
    assert len(rig.plan.layer_groups) == 2
    assert len(rig.manager.dummy_slots()) == 1
    assert rig.manager.usage()[0].free == 7


def test_b17_a_dummy_slot_is_never_a_sequences() -> None:
    """Not when the pool is used to its end, not after the cache was emptied, not by eviction."""
    rig = Rig("mixed, two pool groups", 9)
    dummies = rig.manager.dummy_slots()
    for number in range(6):
        sequence = rig.open([number] * 30, max_match=0)
        assert sequence.grow(8 * BLOCK)
        for group in rig.groups:
            dummy = dummies[rig.plan.layer_groups[group].pool_group]
            assert dummy not in sequence.block_table(group).tolist()
        rig.memory.write(sequence, [number] * 32, 0, 32, 0)
        assert not rig.open([77]).grow(1)
        sequence.advance(32)
        sequence.commit([number] * 32)
        sequence.close()
        if number == 3:
            rig.manager.clear()
        rig.manager.check()
    assert rig.manager.dummy_slots() == dummies


def test_k22_dummies_make_room_and_say_when_there_is_none() -> None:
    rig = Rig("full", 4)
    rig.cache([1] * 16)
    assert len(rig.manager.dummy_slots()) == 1  # a cached page went
    full = Rig("full", 4)
    full.run([1] * 16)
    with pytest.raises(InvariantViolation, match="no free slot for padding rows"):
        full.manager.dummy_slots()


def test_k34_dummies_have_no_priority() -> None:
    rig = Rig("full", 4)
    (slot,) = rig.manager.dummy_slots()
    assert rig.manager._store.pools[0].priority[slot] == 0
    assert not rig.manager._store.pools[0].cached[slot]


def test_k28_rows_come_from_the_whole_number_of_sequence_slots() -> None:
    """B45: not from a captured bucket. Rows of all resident sequences are distinct."""
    slots = RequestSlots(12)
    rows = [slots.acquire(f"r{number}") for number in range(12)]
    assert rows == list(range(12))
    assert (slots.num_rows, slots.dummy_row, slots.in_use) == (13, 12, 12)


def test_b45_exhaustion_names_the_pool_size_and_the_option() -> None:
    slots = RequestSlots(2)
    slots.acquire("a")
    slots.acquire("b")
    with pytest.raises(RequestSlotsExhausted, match=r"request c, all 2 .*max_batch_size"):
        slots.acquire("c")
    assert slots.in_use == 2
    with pytest.raises(ValueError, match="got 0"):
        RequestSlots(0)


def test_k28_acquire_is_idempotent_and_release_ends_once() -> None:
    slots = RequestSlots(3)
    assert [slots.acquire(name) for name in ("a", "b", "a")] == [0, 1, 0]
    slots.release("a")
    with pytest.raises(InvariantViolation, match="request a has no row"):
        slots.release("a")
    assert slots.acquire("c") == 0  # the lowest free one
    assert slots.acquire("d") == 2


def test_k28_padding_rows_always_take_the_dummy_row() -> None:
    slots = RequestSlots(3)
    slots.acquire("a")
    slots.acquire("b")
    assert slots.rows(["b", None, "a", None]).tolist() == [1, 3, 0, 3]
    with pytest.raises(KeyError):
        slots.rows(["gone"])


def test_b9_a_row_never_stands_where_its_last_request_stood() -> None:
    """Warm-up uses the ids of padding rows again and again; positions come from the batch."""
    slots = RequestSlots(2)
    slots.acquire("warm-up")
    slots.seed(slots.rows(["warm-up", None]), slots.rows(["warm-up", None]) + 500)
    assert slots.positions.tolist() == [500, 0, 0]
    slots.release("warm-up")
    slots.acquire("warm-up")
    assert slots.positions.tolist() == [0, 0, 0]
    slots.seed(slots.rows(["warm-up"]), slots.rows(["warm-up"]) + 7)
    assert slots.acquire("warm-up") == 0
    assert slots.positions.tolist() == [7, 0, 0]


def reuse_of(known: int) -> Reuse:
    return Reuse(
        known_tokens=known,
        attention_tokens=known,
        reusable_tokens=0,
        host_tokens=0,
        in_flight_tokens=0,
    )


@pytest.mark.parametrize(
    ("known", "position", "choice", "tokens"),
    [
        (0, 0, BranchChoice.NO_FRESH_MATCH, 0),
        (200, 0, BranchChoice.NO_DIVERGENCE, 0),
        (63, 0, BranchChoice.ALIGNED_TO_ZERO, 0),
        (130, 128, BranchChoice.ALREADY_REUSED, 0),
        (195, 64, BranchChoice.AT_PROMPT_END, 0),
        (130, 127, BranchChoice.TAKEN, 128),
        (191, 0, BranchChoice.TAKEN, 128),
    ],
)
def test_k40_branch_points_are_taken_or_skipped_for_a_reason(
    known: int, position: int, choice: BranchChoice, tokens: int
) -> None:
    found = branch_point(
        reuse_of(known),
        looked_up_tokens=200,
        prompt_tokens=192,
        position=position,
        tokens_per_block=64,
    )
    assert (found.choice, found.tokens) == (choice, tokens)


def test_k40_tokens_lost_to_missing_snapshots_and_to_missing_pages_are_told_apart() -> None:
    rig = state_rig()
    rig.cache(PROMPT[:24])
    rig.open(PROMPT[:20])  # known, but no state stands at 20
    counters = rig.manager.counters
    assert (counters.snapshot_pruned_tokens, counters.page_pruned_tokens) == (19, 0)
    windowed = SpecRig([layer(0), layer(1, window=6)])
    windowed.draft_written(PROMPT)
    windowed.open([*PROMPT[:22], 1])
    counters = windowed.manager.counters
    assert (counters.snapshot_pruned_tokens, counters.page_pruned_tokens) == (0, 22)


def test_k40_both_kinds_in_one_match() -> None:
    """Window pages reach 24 of 30 known tokens, the last snapshot stands at 16."""
    rig = SpecRig([layer(0), layer(1, window=6, heads=3), state_layer(2)])
    first = rig.open(PROMPT)
    assert first.grow(24)
    for end in (16, 24):
        slot = first.acquire_snapshot_slot()
        assert slot is not None
        for group in rig.groups:
            rig.memory.write(first, PROMPT[:end], first.history, end, group)
        states = next(g for g in rig.plan.layer_groups if g.life_cycle.is_state)
        rig.memory.content[states.pool_group][slot][0] = tuple(PROMPT[:end])
        first.advance(end)
        if end == 16:
            assert first.commit_with_snapshot(PROMPT[:16])
    first.commit(PROMPT[16:24])
    first.release_snapshot_slot()
    assert first.grow_to_receive(40)
    first.advance(40)
    first.commit(PROMPT[24:])
    windowed = next(g.id for g in rig.plan.layer_groups if g.life_cycle.window)
    tree = rig.manager._store.tree
    nodes = tree.walk(rig.manager.prompt(SCOPE, PROMPT), 10)
    reach = [int(node) for node in nodes if tree.pages[windowed, node] >= 0]
    assert reach
    before = replace(rig.manager.counters)
    sequence = rig.open([*PROMPT[:30], 1])
    after = rig.manager.counters
    assert sequence.matched_tokens == 16
    lost = after.snapshot_pruned_tokens - before.snapshot_pruned_tokens
    missing = after.page_pruned_tokens - before.page_pruned_tokens
    assert lost + missing == 30 - 16
    assert rig.manager.look(rig.manager.prompt(SCOPE, [*PROMPT[:30], 1])).attention_tokens == (
        16 + lost
    )


def test_k40_backoff_is_no_loss() -> None:
    draft = replace(layer(1, owner=DRAFT, policy=ReusePolicy.OPTIONAL), look_ahead_tokens=1)
    rig = SpecRig([layer(0), draft])
    rig.cache(PROMPT)
    assert rig.open([*PROMPT[:22], 1]).matched_tokens == 21
    counters = rig.manager.counters
    assert (counters.snapshot_pruned_tokens, counters.page_pruned_tokens) == (0, 0)


def test_k40_the_report_comes_at_most_once_a_minute_and_tells_what_happened_since() -> None:
    rig = state_rig()
    report = CountersReport()
    assert report.line(rig.manager.counters, 0) is None
    rig.cache(PROMPT[:24])
    sequence = rig.open(PROMPT[:20])
    rig.manager.count_prefix_wait()
    rig.manager.count_snapshot_asked()
    rig.manager.count_branch(BranchChoice.TAKEN)
    rig.manager.count_branch(BranchChoice.AT_PROMPT_END)
    assert sequence.grow(8)
    slot = sequence.acquire_snapshot_slot()
    write_to(rig, sequence, PROMPT[:8], slot)
    assert sequence.commit_with_snapshot(PROMPT[:8])
    line = report.line(rig.manager.counters, 1000)
    assert line is not None
    assert line.startswith("kv cache: sequences_opened=2 ")
    for part in (
        "snapshot_pruned_tokens=19",
        "snapshots_recorded=1",
        "snapshots_asked=1",
        "prefix_waits=1",
        "branch_taken=1",
        "branch_at_prompt_end=1",
    ):
        assert f" {part}" in line
    assert "page_pruned_tokens" not in line
    rig.manager.count_prefix_wait()
    rig.manager.count_branch(BranchChoice.TAKEN)
    assert report.line(rig.manager.counters, 60_999) is None
    assert report.line(rig.manager.counters, 61_000) == "kv cache: prefix_waits=1 branch_taken=1"
    assert report.line(rig.manager.counters, 200_000) is None


def test_b51_what_a_sequence_has_follows_the_plan_alone() -> None:
    """Restated: no option says whether there is a drafter. It is there if its specs are."""
    for specs, drafts in (
        ([layer(0)], 0),
        ([layer(0), layer(1, heads=2, owner=DRAFT)], 1),
        ([layer(0), state_layer(1), layer(2, heads=2, owner=DRAFT)], 1),
    ):
        rig = SpecRig(specs)
        sequence = rig.run(PROMPT[:9])
        owned = [group for group in rig.plan.layer_groups if group.draft_layer_ids]
        assert len(owned) == drafts
        assert all((sequence.block_table(group.id) >= 0).all() for group in owned)
        assert isinstance(rig.manager.plan, LayoutPlan)
        assert rig.manager.plan is rig.plan


def test_b52_no_default_hides_a_missing_attribute() -> None:
    """Restated: nothing in the package reads an attribute that may be missing, and nothing catches
    that one was.
    """
    for path in sorted(Path(kvcache_core.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", path
                assert node.func.id != "getattr" or len(node.args) == 2, path
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                assert "AttributeError" not in caught, path
                assert caught != "Exception", path
