"""The legs of this worker: those that live, those that ended lately, cancellations that came early.

A leg enters once, under (kind, request id), and leaves once. An id that ended lately is still
known, so that a late ``Cancel`` for it is not taken for an early one and cannot hit a repair of the
same request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from worker.messages import Leg
from worker.remembered import Remembered
from worker.requests import LegRecord

REMEMBERED_IDS = 4096
REMEMBERED_MS = 120_000


class LegTable:
    """Owner of all leg records."""

    def __init__(self) -> None:
        self._legs: dict[tuple[Leg, str], LegRecord] = {}
        self._deadlines: list[tuple[int, int, LegRecord]] = []
        self._ended = Remembered[None](limit=REMEMBERED_IDS, lifetime_ms=REMEMBERED_MS)
        self._cancelled = Remembered[None](limit=REMEMBERED_IDS, lifetime_ms=REMEMBERED_MS)
        self._arrivals = 0

    def next_arrival(self) -> int:
        """A number higher than any before."""
        self._arrivals += 1
        return self._arrivals

    def get(self, kind: Leg, request_id: str) -> LegRecord | None:
        """The living leg, if any."""
        return self._legs.get((kind, request_id))

    def of(self, request_id: str) -> list[LegRecord]:
        """Every living leg of a request."""
        found = (self.get(kind, request_id) for kind in _KINDS)
        return [leg for leg in found if leg is not None]

    def of_connection(self, connection: int) -> list[LegRecord]:
        """Every living leg that came by this connection."""
        return [leg for leg in self._legs.values() if leg.front_end == connection]

    def __iter__(self) -> Iterator[LegRecord]:
        """Living legs in order of arrival."""
        return iter(self._legs.values())

    def __len__(self) -> int:
        return len(self._legs)

    def add(self, leg: LegRecord) -> None:
        """Enter a leg whose id is free."""
        self._legs[leg.kind, leg.request_id] = leg
        heapq.heappush(self._deadlines, (leg.deadline_at_ms, leg.arrival, leg))

    def remove(self, leg: LegRecord, now_ms: int) -> None:
        """The leg has ended."""
        del self._legs[leg.kind, leg.request_id]
        self._ended.put(leg.request_id, None, now_ms)

    def ended_lately(self, request_id: str) -> bool:
        """Whether a leg of this id ended not long ago."""
        return request_id in self._ended

    def remember_cancel(self, request_id: str, now_ms: int) -> None:
        """A cancellation of an id that is not known here: it holds for a leg that arrives later."""
        if request_id not in self._ended:
            self._cancelled.put(request_id, None, now_ms)

    def was_cancelled(self, request_id: str) -> bool:
        """Whether a cancellation came before; it is kept, for the other leg may arrive here too."""
        return request_id in self._cancelled

    def overdue(self, now_ms: int) -> list[LegRecord]:
        """Living legs whose deadline has passed."""
        self._ended.expire(now_ms)
        self._cancelled.expire(now_ms)
        late: list[LegRecord] = []
        while self._deadlines and (self._deadlines[0][0] <= now_ms or self._deadlines[0][2].ended):
            leg = heapq.heappop(self._deadlines)[2]
            if not leg.ended:
                late.append(leg)
        return late

    def next_deadline_ms(self) -> int | None:
        """When the next living leg is overdue."""
        while self._deadlines and self._deadlines[0][2].ended:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


_KINDS: tuple[Leg, ...] = ("context", "generation")
