"""Short memories of a shell: cancellations that came before their request, sessions that are over.

Both are bounded by count, oldest out first, and hold no pages.
"""

from __future__ import annotations

from collections import OrderedDict


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
