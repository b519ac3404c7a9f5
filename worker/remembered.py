"""Facts that arrived before the request they belong to: kept for a while, bounded in number, never
for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Remembered(Generic[ValueT]):
    """Map from request id to a fact, oldest first. At most ``limit`` entries, none older than
    ``lifetime_ms``.
    """

    def __init__(self, *, limit: int, lifetime_ms: int) -> None:
        self._limit = limit
        self._lifetime_ms = lifetime_ms
        self._facts: OrderedDict[str, tuple[int, ValueT]] = OrderedDict()

    def put(self, request_id: str, fact: ValueT, now_ms: int) -> list[str]:
        """Remember a fact, replacing an older one. Returns ids pushed out because there were too
        many.
        """
        self._facts.pop(request_id, None)
        self._facts[request_id] = (now_ms, fact)
        pushed_out = []
        while len(self._facts) > self._limit:
            pushed_out.append(self._facts.popitem(last=False)[0])
        return pushed_out

    def take(self, request_id: str) -> ValueT | None:
        """Remove and return the fact, or None."""
        entry = self._facts.pop(request_id, None)
        return None if entry is None else entry[1]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._facts

    def __len__(self) -> int:
        return len(self._facts)

    def expire(self, now_ms: int) -> list[str]:
        """Forget what is too old and return its ids."""
        expired = []
        while self._facts:
            request_id, (since_ms, _) = next(iter(self._facts.items()))
            if now_ms - since_ms < self._lifetime_ms:
                break
            del self._facts[request_id]
            expired.append(request_id)
        return expired

    def next_expiry_ms(self) -> int | None:
        """When ``expire`` will next have something to do."""
        for since_ms, _ in self._facts.values():
            return since_ms + self._lifetime_ms
        return None
