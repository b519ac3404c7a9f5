"""Everything that reaches the engine from other threads, in one queue that wakes it up.

Any thread may ``put``; only the engine takes. An idle engine sleeps here, so a wake-up costs one
lock and no spinning.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from transfer.agent_events import AgentEvent
from worker.messages import Cancel, Generate, Prefill, Stop, Warm
from worker.rank_facts import GroupFact

Command = Prefill | Generate | Cancel | Stop | Warm


@dataclass(frozen=True, slots=True)
class FrontEndCommand:
    """A message of the front end behind ``connection``."""

    connection: int
    message: Command


@dataclass(frozen=True, slots=True)
class FrontEndLost:
    """The connection is gone; nobody waits for its requests any more."""

    connection: int


@dataclass(frozen=True, slots=True)
class FrontEndJoined:
    """A front end was welcomed and wants to know how the worker is."""

    connection: int


@dataclass(frozen=True, slots=True)
class PairsChanged:
    """The transfer agent's pairs are others than before; the gauges tell which."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End every leg and stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankReported:
    """Another rank of this instance says how its part of a transfer goes."""

    rank: int
    fact: GroupFact


InboxItem = (
    FrontEndCommand
    | FrontEndLost
    | FrontEndJoined
    | AgentEvent
    | RankReported
    | PairsChanged
    | Shutdown
)


class Inbox:
    """Unbounded queue: what fills it is bounded at its sources (connections, sessions)."""

    def __init__(self) -> None:
        self._items: deque[InboxItem] = deque()
        self._wake = threading.Condition()

    def put(self, item: InboxItem) -> None:
        """Append from any thread."""
        with self._wake:
            self._items.append(item)
            self._wake.notify()

    def take(self) -> list[InboxItem]:
        """Everything that is there now, oldest first."""
        with self._wake:
            return self._drain()

    def wait(self, timeout_ms: int | None) -> list[InboxItem]:
        """Sleep until something arrives or ``timeout_ms`` has passed (None: no limit), then take
        everything.
        """
        with self._wake:
            if not self._items:
                self._wake.wait(None if timeout_ms is None else max(timeout_ms, 0) / 1000)
            return self._drain()

    def _drain(self) -> list[InboxItem]:
        items = list(self._items)
        self._items.clear()
        return items
