"""What the ranks of an instance agree on about their transfers.

A request's pages are there when every rank has its part, and lost when one rank's are. The decision
uses collective data alone: a rank that looked at its own sessions to skip a collective would leave
the others waiting in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transfer.rank_info import ParallelShape

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """Requests whose transfers have ended, on one rank or by agreement; no id is in two sets."""

    completed: frozenset[str] = NOTHING
    failed: frozenset[str] = NOTHING
    cancelled: frozenset[str] = NOTHING


class RankGroup(Protocol):
    """The ranks that serve one sequence. Both calls block until every rank has made the same."""

    def gather_count(self, value: int) -> Sequence[int]:
        """One integer of every rank, in order of ranks."""

    def gather_facts(self, facts: TransferFacts) -> Sequence[TransferFacts]:
        """The facts of every rank, in order of ranks."""


def agree(facts: Sequence[TransferFacts]) -> TransferFacts:
    """Completed is what completed on all ranks, failed and cancelled what did so on any.

    A request that failed on one rank and was cancelled on another has failed. What has ended on
    some ranks only is in none of the sets: it stays pending.
    """
    failed = NOTHING.union(*(rank.failed for rank in facts))
    cancelled = NOTHING.union(*(rank.cancelled for rank in facts)) - failed
    everywhere = facts[0].completed.intersection(*(rank.completed for rank in facts[1:]))
    return TransferFacts(everywhere - failed - cancelled, failed, cancelled)


def can_probe(shape: ParallelShape, world_size: int) -> bool:
    """Whether polls begin with :func:`poll_probed`'s one integer: context parallel ranks without
    attention data parallelism and pipeline stages, and no others in the group.
    """
    return (
        shape.cp_size > 1
        and shape.dp_size == 1
        and shape.pp_size == 1
        and world_size == shape.tp_size * shape.cp_size
    )


def poll(group: RankGroup, facts: TransferFacts) -> TransferFacts:
    """The agreement of all ranks now."""
    return agree(group.gather_facts(facts))


def poll_probed(group: RankGroup, open_sessions: int, facts: TransferFacts) -> TransferFacts:
    """:func:`poll`, which costs one integer a rank while no rank has an open session.

    ``open_sessions`` counts those whose end this rank has not told yet. For polls that do not
    block; whoever waits for a request polls in full.
    """
    if not any(group.gather_count(open_sessions)):
        return TransferFacts()
    return poll(group, facts)
