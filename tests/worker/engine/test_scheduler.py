"""Scheduling decisions as functions of values."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from worker.scheduler import (
    NEW,
    Admission,
    Demotion,
    Item,
    Limits,
    Phase,
    Row,
    plan_admission,
    plan_step,
)

LIMITS = Limits(max_batch_tokens=16, max_running=4, total=(10,))
ROOMY = Limits(max_batch_tokens=16, max_running=64, total=(10,))


def item(key: int, phase: Phase, demand: int, rows: int = 1) -> Item:
    return Item(key, phase, (key, 0), (demand,), rows)


def admitted(items: list[Item], available: int) -> list[int]:
    plan = plan_admission(items, (available,), LIMITS)
    return sorted(plan.resume + plan.land + plan.admit + plan.grant)


def test_smaller_ones_pass_until_they_have_as_much_as_the_one_they_passed() -> None:
    queue = [item(1, Phase.QUEUED, 7)] + [item(key, Phase.QUEUED, 2) for key in range(2, 9)]
    plan = plan_admission(queue, (6,), ROOMY)
    assert (plan.admit, plan.passed, plan.short_of_slots) == ((2, 3, 4), ((1, 6),), 1)
    queue[0] = queue[0]._replace(passed=6)
    assert admitted(queue, 6) == []
    assert admitted(queue, 9) == [1, 2]


def test_no_new_item_passes_one_that_somebody_waits_for() -> None:
    for phase in (Phase.SUSPENDED, Phase.LANDING, Phase.PROMISED):
        assert admitted([item(1, phase, 7), item(2, Phase.QUEUED, 2)], 6) == []


def test_who_was_promised_room_lands_whatever_new_ones_wait_for() -> None:
    tired = item(1, Phase.GRANTING, 9)._replace(passed=9)
    assert admitted([tired, item(2, Phase.LANDING, 4), item(3, Phase.QUEUED, 1)], 6) == [2]


def test_a_new_item_takes_nothing_that_was_promised_to_a_younger_one() -> None:
    assert admitted([item(1, Phase.GRANTING, 4), item(2, Phase.PROMISED, 4)], 6) == []
    assert admitted([item(1, Phase.GRANTING, 2), item(2, Phase.PROMISED, 4)], 6) == [1]


def test_arrival_decides_and_not_the_order_of_the_list() -> None:
    queue = [item(2, Phase.QUEUED, 6), item(1, Phase.SUSPENDED, 6)]
    plan = plan_admission(queue, (10,), LIMITS)
    assert plan == Admission(resume=(1,), land=(), admit=(), grant=(), short_of_slots=2)


def test_room_for_what_runs_and_receives_is_set_aside_first() -> None:
    items = [
        item(1, Phase.RUNNING, 2),
        item(2, Phase.RECEIVING, 1),
        item(3, Phase.GRANTING, 5),
        item(4, Phase.GRANTING, 5),
    ]
    assert admitted(items, 10) == [3]


def test_a_promise_holds_its_room_against_younger_items() -> None:
    items = [item(1, Phase.PROMISED, 6), item(2, Phase.GRANTING, 5)]
    assert admitted(items, 10) == []
    assert admitted([item(1, Phase.PROMISED, 6), item(2, Phase.GRANTING, 4)], 10) == [2]


def test_an_old_suspended_sequence_is_not_kept_out_by_a_young_promise() -> None:
    items = [item(1, Phase.SUSPENDED, 6), item(2, Phase.PROMISED, 6)]
    assert admitted(items, 10) == [1]


def test_a_landing_transfer_takes_the_room_it_was_promised() -> None:
    items = [item(1, Phase.LANDING, 6), item(2, Phase.PROMISED, 4)]
    assert plan_admission(items, (10,), LIMITS).land == (1,)


def test_one_prompt_borrows_promised_room_while_nobody_computes() -> None:
    promised = item(1, Phase.PROMISED, 6)
    tired = item(2, Phase.GRANTING, 9)._replace(passed=9)
    prompts = [item(key, Phase.QUEUED, 3)._replace(borrows=True) for key in (3, 4)]
    assert admitted([promised, tired, *prompts], 8) == [3]
    assert admitted([promised, tired, *prompts, item(5, Phase.RUNNING, 0)], 8) == []
    assert admitted([promised, tired, *prompts, item(5, Phase.RUNNING, 0, rows=0)], 8) == [3]
    assert admitted([promised, prompts[0]._replace(borrows=False)], 8) == []
    # What was called for is not lent.
    called = item(1, Phase.LANDING, 6)
    assert admitted([called, tired, *prompts], 8) == [1]


def test_growth_blocks_never_keep_out_what_fits_alone() -> None:
    assert admitted([item(1, Phase.QUEUED, 11)], 10) == [1]
    assert admitted([item(1, Phase.QUEUED, 11)], 9) == []


def test_no_more_rows_than_a_step_has() -> None:
    items = [item(1, Phase.RUNNING, 0, rows=2), item(2, Phase.QUEUED, 1, rows=3)]
    assert admitted(items, 10) == []
    assert admitted([item(2, Phase.QUEUED, 1, rows=4)], 10) == [2]


def row(key: int, pending: int, last_step: int = 0) -> Row:
    return Row(key, (key, 0), pending, last_step)


def chunks(rows: list[Row], limits: Limits = LIMITS) -> dict[int, int]:
    return {chunk.key: chunk.tokens for chunk in plan_step(rows, limits).chunks}


def test_decoding_runs_in_every_step_beside_a_long_prefill() -> None:
    assert chunks([row(1, 1000), row(2, 1), row(3, 1)]) == {1: 14, 2: 1, 3: 1}


def test_the_oldest_prompt_has_half_of_the_budget_and_the_nearest_the_rest() -> None:
    assert chunks([row(1, 100), row(2, 20), row(3, 5)]) == {1: 8, 3: 5, 2: 3}


def test_what_the_others_leave_goes_back_to_the_oldest() -> None:
    assert chunks([row(1, 100), row(2, 3)]) == {1: 13, 2: 3}
    assert chunks([row(1, 3), row(2, 100)]) == {1: 3, 2: 13}
    assert chunks([row(1, 100)]) == {1: 16}


def test_a_demoted_prompt_comes_last_until_it_is_starved() -> None:
    limits = replace(LIMITS, demotion=Demotion(uncached_tokens=50, max_iters=2))
    rows = [row(1, 60), row(2, 20), row(3, 12)]
    assert chunks(rows, limits) == {2: 8, 3: 8}
    assert plan_step(rows, limits).demoted == (1,)
    rows[0] = rows[0]._replace(demoted=2)
    assert chunks(rows, limits) == {1: 8, 3: 8}
    assert plan_step(rows, limits).demoted == ()
    assert plan_step([row(1, 60)], limits).demoted == ()


def test_pages_are_given_oldest_first_and_taken_youngest_first() -> None:
    plan = plan_step([row(3, 1), row(1, 5), row(2, 1)], LIMITS)
    assert [chunk.key for chunk in plan.chunks] == [1, 2, 3]
    assert plan.victims == (3, 2, 1)


def test_more_decoding_sequences_than_budget_take_turns() -> None:
    limits = Limits(max_batch_tokens=2, max_running=8, total=(10,))
    last = dict.fromkeys(range(5), 0)
    for step in range(1, 11):
        for key in chunks([row(key, 1, last[key]) for key in last], limits):
            last[key] = step
    assert min(last.values()) >= 8


def test_a_prefill_gets_its_share_beside_any_number_of_decoding_sequences() -> None:
    limits = Limits(max_batch_tokens=8, max_running=64, total=(10,))
    rows = [row(key, 1) for key in range(1, 40)] + [row(0, 100)]
    assert chunks(rows, limits)[0] == 2


pending = st.lists(st.integers(1, 50), max_size=12)


@given(pending, st.integers(1, 40), st.integers(1, 12))
def test_a_step_keeps_its_bounds_and_never_idles(
    sizes: list[int], budget: int, places: int
) -> None:
    limits = Limits(max_batch_tokens=budget, max_running=places, total=(10,))
    rows = [row(key, size) for key, size in enumerate(sizes)]
    taken = chunks(rows, limits)
    assert sum(taken.values()) <= budget
    assert len(taken) <= places
    assert all(1 <= tokens <= sizes[key] for key, tokens in taken.items())
    assert bool(taken) == bool(rows)


phases = st.sampled_from(list(Phase))
items_strategy = st.lists(st.tuples(phases, st.integers(0, 12), st.integers(1, 3)), max_size=10)


@given(items_strategy, st.integers(0, 10))
def test_admission_never_gives_more_than_there_is(
    parts: list[tuple[Phase, int, int]], available: int
) -> None:
    items = [
        Item(key, phase, (key, 0), (need,), rows) for key, (phase, need, rows) in enumerate(parts)
    ]
    chosen = set(admitted(items, available))
    held = [one for one in items if one.phase in (Phase.RUNNING, Phase.RECEIVING)]
    taken = [one for one in items if one.key in chosen]
    if taken:
        assert sum(min(one.demand[0], 10) for one in taken) <= available - sum(
            one.demand[0] for one in held
        )
        assert sum(one.rows for one in held + taken) <= LIMITS.max_running


@given(items_strategy, st.integers(0, 10), st.integers(0, 5), st.integers(0, 2))
def test_who_was_refused_is_refused_again_where_there_is_no_more(
    parts: list[tuple[Phase, int, int]], available: int, less: int, rows: int
) -> None:
    """The engine does not look again at those who wait while this holds."""
    items = [
        Item(key, phase, (key, 0), (need,), rows, borrows=phase is Phase.QUEUED)
        for key, (phase, need, rows) in enumerate(parts, 1)
    ]
    running = Item(0, Phase.RUNNING, (0, 0), (1,), 1)
    again = Item(0, Phase.RUNNING, (0, 0), (1 + less,), 1 + rows)
    if plan_admission([running, *items], (available,), LIMITS).is_empty:
        assert plan_admission([again, *items], (available,), LIMITS).is_empty


@given(items_strategy, st.integers(0, 10), st.integers(0, 8))
def test_nobody_is_passed_by_more_than_it_wants_itself(
    parts: list[tuple[Phase, int, int]], available: int, before: int
) -> None:
    items = [
        Item(key, phase, (key, 0), (need,), rows, before)
        for key, (phase, need, rows) in enumerate(parts)
    ]
    plan = plan_admission(items, (available,), LIMITS)
    for key, slots in plan.passed:
        one = items[key]
        assert one.phase in NEW
        assert key not in plan.admit + plan.grant + plan.land
        assert 0 < slots <= max(0, min(one.demand[0], 10) - before)
