"""What an admission planner sees and says: values in, a rank a candidate out.

A planner replaces the window of KV-balanced admission and the plan within it; the queue, its
bounds and the placement of whatever the planner leaves out stay the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RankLoad(NamedTuple):
    """One dp group as admission sees it."""

    free_tokens: int
    """Tokens of free and evictable pages, less what its waiting requests will take; below 0 where
    they wait for more than there is.
    """
    requests: int
    """Legs that live there."""


class Candidate(NamedTuple):
    """A request that lives nowhere yet."""

    lacking: tuple[int, ...]
    """Its tokens that the cache of each dp group lacks."""
    skipped: int
    """Rounds in which it was left out."""


class AdmissionPlanner(Protocol):
    """Places the head of the queue. Used by the engine thread, at most a few times a step."""

    def window(self) -> int:
        """Of how many of the oldest candidates a plan is made. Below 1: the engine's own number."""

    def plan(
        self,
        *,
        candidates: Sequence[Candidate],
        candidate_groups: Sequence[int],
        ranks: Sequence[RankLoad],
    ) -> Sequence[int | None] | None:
        """A dp group for each candidate, or None for one that waits for the next round. None alone:
        all are placed in order of arrival.

        ``candidates`` come oldest first; one with a lower number in ``candidate_groups`` goes
        before all with a higher one. Served in order of arrival, all are of group 0.
        """
