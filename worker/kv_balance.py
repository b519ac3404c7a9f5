"""On which dp group a request is to live, as pure functions of values.

Each goes where most room is left behind it, so that a group which holds its prefix is worth as much
as the tokens are that need not be computed there. In order of arrival that is all. KV-balanced
admission looks at the oldest few together, gives out the largest first, and lets wait what fits
nowhere, for a bounded number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from worker.admission_planner import AdmissionPlanner, Candidate, RankLoad

KV_BALANCE_WINDOW: Final = 32
"""Candidates that are placed together."""
KV_BALANCE_MAX_SKIPPED_ROUNDS: Final = 16
"""Left out this often, a candidate is placed whether it fits or not."""


def roomiest(candidate: Candidate, ranks: Sequence[RankLoad]) -> int:
    """The group with most room behind the candidate; of equals the one with the fewest requests,
    then the first.
    """
    return max(
        range(len(ranks)),
        key=lambda r: (ranks[r].free_tokens - candidate.lacking[r], -ranks[r].requests, -r),
    )


def with_one_more(
    ranks: Sequence[RankLoad], candidate: Candidate, rank: int
) -> tuple[RankLoad, ...]:
    """The loads once the candidate lives on ``rank``."""
    load = ranks[rank]
    more = RankLoad(load.free_tokens - candidate.lacking[rank], load.requests + 1)
    return (*ranks[:rank], more, *ranks[rank + 1 :])


def in_order(candidates: Sequence[Candidate], ranks: Sequence[RankLoad]) -> tuple[int, ...]:
    """A group for every candidate, first come first served."""
    loads = tuple(ranks)
    placed: list[int] = []
    for candidate in candidates:
        rank = roomiest(candidate, loads)
        loads = with_one_more(loads, candidate, rank)
        placed.append(rank)
    return tuple(placed)


class KvBalance(AdmissionPlanner):
    """Largest first within a group of candidates; whoever fits nowhere waits."""

    @override
    def window(self) -> int:
        return KV_BALANCE_WINDOW

    @override
    def plan(
        self,
        *,
        candidates: Sequence[Candidate],
        candidate_groups: Sequence[int],
        ranks: Sequence[RankLoad],
    ) -> tuple[int | None, ...]:
        loads = tuple(ranks)
        placed: list[int | None] = [None] * len(candidates)
        order = sorted(
            range(len(candidates)),
            key=lambda i: (candidate_groups[i], -min(candidates[i].lacking), i),
        )
        for index in order:
            candidate = candidates[index]
            rank = roomiest(candidate, loads)
            if candidate.lacking[rank] <= loads[rank].free_tokens:
                placed[index] = rank
                loads = with_one_more(loads, candidate, rank)
        return tuple(placed)


def unfit(plan: Sequence[int | None], candidates: int, ranks: int) -> str:
    """Why this is no plan for so many candidates and groups; empty where it is one."""
    if len(plan) != candidates:
        return f"expected a group for each of {candidates} candidates, got {len(plan)}"
    wrong = [rank for rank in plan if rank is not None and not 0 <= rank < ranks]
    return f"expected groups 0 to {ranks - 1}, got {wrong}" if wrong else ""


def round_size(planner: AdmissionPlanner | None, skipped: Sequence[int]) -> int:
    """How many of the oldest requests the next round is about, from the rounds in which each was
    left out: whoever was left out too often, else the planner's window, without a planner all.
    """
    if planner is None:
        return len(skipped)
    # They are the oldest: who came later was left out no more often.
    forced = sum(rounds >= KV_BALANCE_MAX_SKIPPED_ROUNDS for rounds in skipped)
    if forced:
        return forced
    window = planner.window()
    return min(len(skipped), window if window >= 1 else KV_BALANCE_WINDOW)


def plan_round(
    planner: AdmissionPlanner | None, candidates: Sequence[Candidate], ranks: Sequence[RankLoad]
) -> tuple[tuple[int | None, ...], str]:
    """A group for each candidate of a round (:func:`round_size`), None for those who wait, and what
    is wrong with the planner's word, if anything.

    Whoever was left out too often is not the planner's to decide. Where there is no planner, it has
    no plan, or none that can be carried out, all are placed in order of arrival.
    """
    in_turn = in_order(candidates, ranks)
    if planner is None or candidates[0].skipped >= KV_BALANCE_MAX_SKIPPED_ROUNDS:
        return in_turn, ""
    groups = [0] * len(candidates)
    plan = planner.plan(candidates=candidates, candidate_groups=groups, ranks=ranks)
    if plan is None:
        return in_turn, ""
    wrong = unfit(plan, len(candidates), len(ranks))
    return (in_turn, wrong) if wrong else (tuple(plan), "")
