"""Short memories of a shell: cancellations that came before their request, sessions that are over.

Both are bounded by count, oldest out first, and hold no pages.
"""

from __future__ import annotations

from collections import OrderedDict


class PendingCancels:
    """Reasons of cancellations for request ids that are not known yet."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, reason: str) -> None:
        """Keep the reason until the request comes; the first reason stays."""
        self._reasons.setdefault(request_id, reason)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def take(self, request_id: str) -> str | None:
        """The reason if this request was cancelled before it came, and forget it."""
        return self._reasons.pop(request_id, None)


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
