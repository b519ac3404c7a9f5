"""What places waiting requests on the ranks of an instance with attention data parallelism, as far
as a model may bring its own.

A planner decides and keeps nothing: how long a request may be passed over before it is admitted
all the same, and what happens to requests that a plan leaves out, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class AdmissionPlanner(Protocol):
    """Which of the first waiting requests go to which rank: a function of its arguments."""

    def window(self) -> int:
        """Waiting requests, counted from the head of the queue, that a plan may choose from."""
        ...

    def plan(
        self,
        needed_blocks: Sequence[int],
        free_blocks: Sequence[int],
        *,
        candidate_groups: Sequence[int],
    ) -> Sequence[int | None]:
        """Rank of each candidate; None: not in this round.

        ``needed_blocks`` ``[candidates]`` in order of arrival, ``free_blocks`` ``[ranks]``.
        ``candidate_groups`` ``[candidates]``: those of a lower group go first; all 0 where the
        queue is first come, first served.
        """
        ...
