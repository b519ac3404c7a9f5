"""What the prefix tree tells routers: blocks stored, blocks removed, everything cleared.

Only full blocks are reported. ``sequence`` counts without gaps from 0 in one incarnation, so that a
reader that misses events (the log keeps the newest EVENT_LIMIT) notices and asks for the truth.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

EVENT_LIMIT = 4096
"""A few MB where nobody reads. Whoever reads does so every few steps, of some ten events each."""


@dataclass(frozen=True, kw_only=True)
class BlocksStored:
    """A chain of full blocks can now be matched: ``keys`` in order, below ``parent``."""

    incarnation: str
    sequence: int
    parent: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class BlocksRemoved:
    """These full blocks cannot be matched any more."""

    incarnation: str
    sequence: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class CacheCleared:
    """No block can be matched any more."""

    incarnation: str
    sequence: int


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventLog:
    """Events not taken yet, oldest first."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._next = 0
        self._events: deque[CacheEvent] = deque()
        self._limit = EVENT_LIMIT

    def begin_truth(self) -> None:
        """What is recorded until :meth:`end_truth` is the whole truth: none of it is dropped for
        room.
        """
        self._limit = sys.maxsize
        self.cleared()

    def end_truth(self) -> None:
        """The usual limit counts again, beyond what is there."""
        self._limit = len(self._events) + EVENT_LIMIT

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """Record BlocksStored."""
        self._append(
            BlocksStored(
                incarnation=self._incarnation,
                sequence=self._number(),
                parent=parent,
                keys=tuple(keys),
            )
        )

    def removed(self, keys: Sequence[bytes]) -> None:
        """Record BlocksRemoved."""
        self._append(
            BlocksRemoved(incarnation=self._incarnation, sequence=self._number(), keys=tuple(keys))
        )

    def cleared(self) -> None:
        """Record CacheCleared."""
        self._append(CacheCleared(incarnation=self._incarnation, sequence=self._number()))

    def take(self) -> list[CacheEvent]:
        """All events since the last call."""
        events = list(self._events)
        self._events.clear()
        self._limit = EVENT_LIMIT
        return events

    def _append(self, event: CacheEvent) -> None:
        self._events.append(event)
        if len(self._events) > self._limit:
            self._events.popleft()

    def _number(self) -> int:
        number = self._next
        self._next += 1
        return number
