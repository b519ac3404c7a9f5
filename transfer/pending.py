"""Short memories of a shell: cancellations that came before their request, sessions that are over.

Both are bounded by count, oldest out first, and hold no pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from transfer.identity import Incarnation, RankId
from transfer.outcome import Outcome


class PendingCancels:
    """Reasons of cancellations for request ids that are not known yet.

    A cancellation may cross the end of what it is meant for, and an id may come again: it is
    remembered for ids never seen only, not for those that are over.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()

    def remember(self, request_id: str, reason: str) -> None:
        """Keep the reason until the request comes; the first reason stays."""
        if request_id in self._over:
            return
        self._reasons.setdefault(request_id, reason)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def take(self, request_id: str) -> str | None:
        """The request comes: the reason if it was cancelled before, and forget it."""
        self._over.pop(request_id, None)
        return self._reasons.pop(request_id, None)

    def over(self, request_id: str) -> None:
        """The request came and is over: what is cancelled from now on was meant for it."""
        self._over[request_id] = None
        while len(self._over) > self._capacity:
            self._over.popitem(last=False)


class EndedSessions:
    """Ids of sessions that are over, so that a late grant does not start one again."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, session: str) -> None:
        """Remember a session that is over."""
        self._ids[session] = None
        while len(self._ids) > self._capacity:
            self._ids.popitem(last=False)

    def __contains__(self, session: str) -> bool:
        return session in self._ids


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A request that ended before all receivers had granted it: who had, and why it ended."""

    generation: Incarnation
    granted: frozenset[int]
    """Ranks that have granted it; those yet to come are told how it ended."""
    missing: int
    outcome: Outcome
    reason: str


class UnfinishedGrants:
    """Requests that some receivers may still grant although they are over."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[str, Unfinished] = OrderedDict()

    def remember(self, request_id: str, end: Unfinished) -> None:
        """Keep it until the missing grants come."""
        self._ends[request_id] = end
        while len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def take(self, request_id: str, peer: RankId) -> Unfinished | None:
        """A rank grants this id: how it ended, if that grant was still missing.

        A rank that has granted it before, or another instance, means a new request of that id.
        """
        end = self._ends.pop(request_id, None)
        if end is None or peer.incarnation != end.generation or peer.rank in end.granted:
            return None
        if end.missing > 1:
            self._ends[request_id] = Unfinished(
                end.generation,
                end.granted | {peer.rank},
                end.missing - 1,
                end.outcome,
                end.reason,
            )
        return end
