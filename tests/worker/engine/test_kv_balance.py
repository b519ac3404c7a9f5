"""Where requests are to live, as a function of values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from worker.admission_planner import AdmissionPlanner, Candidate, RankLoad
from worker.kv_balance import (
    KV_BALANCE_MAX_SKIPPED_ROUNDS,
    KV_BALANCE_WINDOW,
    KvBalance,
    in_order,
    plan_round,
    round_size,
    with_one_more,
)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Candidate], list[RankLoad]]:
    """Candidates, the oldest left out most often, and two to four groups."""
    ranks = draw(st.integers(2, 4))
    loads = [RankLoad(draw(st.integers(-50, 300)), draw(st.integers(0, 5))) for _ in range(ranks)]
    skipped = sorted(draw(st.lists(st.integers(0, 20), max_size=40)), reverse=True)
    lacking = st.lists(st.integers(1, 200), min_size=ranks, max_size=ranks).map(tuple)
    return [Candidate(draw(lacking), count) for count in skipped], loads


def loads_after(
    candidates: Sequence[Candidate], plan: Sequence[int | None], ranks: Sequence[RankLoad]
) -> tuple[RankLoad, ...]:
    loads = tuple(ranks)
    for candidate, rank in zip(candidates, plan, strict=False):
        if rank is not None:
            loads = with_one_more(loads, candidate, rank)
    return loads


def planned(
    planner: AdmissionPlanner, candidates: Sequence[Candidate], ranks: Sequence[RankLoad]
) -> tuple[tuple[int | None, ...], str]:
    """One round over the queue's head."""
    size = round_size(planner, [one.skipped for one in candidates])
    return plan_round(planner, candidates[:size], ranks) if size else ((), "")


@given(rounds())
def test_what_a_round_may_do(given: tuple[list[Candidate], list[RankLoad]]) -> None:
    """Nobody is placed beyond the room there is but who waited too long, and who waits fits nowhere
    any more.
    """
    candidates, ranks = given
    forced = [one for one in candidates if one.skipped >= KV_BALANCE_MAX_SKIPPED_ROUNDS]
    plan, wrong = planned(KvBalance(), candidates, ranks)
    assert not wrong
    after = loads_after(candidates, plan, ranks)
    if forced:
        assert len(plan) == len(forced)
        assert None not in plan
        return
    assert len(plan) == min(len(candidates), KV_BALANCE_WINDOW)
    for load, before in zip(after, ranks, strict=True):
        assert load.free_tokens >= min(0, before.free_tokens)
    for candidate, rank in zip(candidates, plan, strict=False):
        if rank is None:
            room = (
                load.free_tokens - lack for load, lack in zip(after, candidate.lacking, strict=True)
            )
            assert max(room) < 0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(2, 4))
def test_equal_groups_stay_equal(sizes: list[int], count: int) -> None:
    """Free tokens never differ by more than one request; in either way of placing."""
    candidates = [Candidate((size,) * count, 0) for size in sizes]
    ranks = [RankLoad(10_000, 0)] * count
    for plan in (in_order(candidates, ranks), planned(KvBalance(), candidates, ranks)[0]):
        free = [load.free_tokens for load in loads_after(candidates, plan, ranks)]
        assert max(free) - min(free) <= max(sizes)


@given(rounds())
def test_in_order_everybody_is_placed(given: tuple[list[Candidate], list[RankLoad]]) -> None:
    candidates, ranks = given
    plan = in_order(candidates, ranks)
    assert len(plan) == len(candidates)
    for index, rank in enumerate(plan):
        loads = loads_after(candidates[:index], plan[:index], ranks)
        room = [
            load.free_tokens - lack
            for load, lack in zip(loads, candidates[index].lacking, strict=True)
        ]
        assert room[rank] == max(room)


def test_a_held_prefix_draws_until_the_other_group_has_more_room() -> None:
    held = Candidate((10, 100), 0)
    assert in_order([held], [RankLoad(500, 3), RankLoad(560, 0)]) == (0,)
    assert in_order([held], [RankLoad(500, 3), RankLoad(600, 0)]) == (1,)


def test_the_largest_is_given_out_first() -> None:
    """In order of arrival the large one would come on top of a small one."""
    candidates = [Candidate((size, size), 0) for size in (50, 50, 100)]
    ranks = [RankLoad(110, 0), RankLoad(110, 0)]
    assert planned(KvBalance(), candidates, ranks)[0] == (1, 1, 0)
    assert in_order(candidates, ranks) == (0, 1, 0)


class Scripted(AdmissionPlanner):
    """Says what it is told to, and notes what it is asked."""

    def __init__(self, window: int, says: Sequence[int | None] | None) -> None:
        self._window = window
        self._says = says
        self.asked: list[tuple[int, list[int]]] = []

    @override
    def window(self) -> int:
        return self._window

    @override
    def plan(
        self,
        *,
        candidates: Sequence[Candidate],
        candidate_groups: Sequence[int],
        ranks: Sequence[RankLoad],
    ) -> Sequence[int | None] | None:
        self.asked.append((len(candidates), list(candidate_groups)))
        return self._says


RANKS = [RankLoad(100, 0), RankLoad(100, 0)]
THREE = [Candidate((10, 10), 0)] * 3


def test_an_injected_planner_sees_its_window_in_order_of_arrival() -> None:
    planner = Scripted(2, (1, None))
    assert planned(planner, THREE, RANKS) == ((1, None), "")
    assert planner.asked == [(2, [0, 0])]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (None, ""),
        ((0,), "expected a group for each of 2 candidates, got 1"),
        ((0, 2), r"expected groups 0 to 1, got [2]"),
        ((-1, 0), r"expected groups 0 to 1, got [-1]"),
    ],
)
def test_without_a_plan_that_can_be_carried_out_all_are_placed_in_order(
    says: Sequence[int | None] | None, why: str
) -> None:
    assert planned(Scripted(2, says), THREE, RANKS) == ((0, 1), why)


def test_no_window_of_its_own() -> None:
    planner = Scripted(0, None)
    assert planned(planner, THREE, RANKS)[0] == (0, 1, 0)
    assert planner.asked == [(3, [0, 0, 0])]


def test_left_out_too_often() -> None:
    """The planner is not asked about them."""
    planner = Scripted(8, (None, None))
    waited = Candidate((500, 600), KV_BALANCE_MAX_SKIPPED_ROUNDS)
    assert planned(planner, [waited, *THREE], RANKS) == ((0,), "")
    assert planner.asked == []
    assert planned(planner, [waited._replace(skipped=15), THREE[0]], RANKS)[0] == (None, None)


def test_without_a_planner_everybody_has_a_turn_at_once() -> None:
    assert round_size(None, [30, 0, 0]) == 3
    assert plan_round(None, THREE, RANKS) == ((0, 1, 0), "")


def test_a_lower_group_goes_first() -> None:
    plan = KvBalance().plan(
        candidates=[Candidate((90, 90), 0), Candidate((60, 60), 0), Candidate((50, 50), 0)],
        candidate_groups=[1, 0, 0],
        ranks=RANKS,
    )
    assert plan == (None, 0, 1)
