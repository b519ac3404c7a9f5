"""A virtual clock and links between ranks that delay, duplicate and lose; tag-matched page moves.

Control messages of one link and direction arrive in order; copies arrive late. A page move writes
the receiver's pages at one random moment after both ends were posted, also when an end has been
told meanwhile that the link is lost: only a dead process touches nothing.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from transfer.messages import SessionMessage

Action = Callable[[], None]


class Clock:
    """Runs actions in order of virtual milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._numbers = count()

    def after(self, delay_ms: int, action: Action) -> None:
        heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._numbers), action))

    def run(self, most_actions: int = 200_000) -> None:
        for _ in range(most_actions):
            if not self._heap:
                return
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
        raise AssertionError("the simulation does not come to rest")


@dataclass(frozen=True)
class Weather:
    """How bad the network is."""

    delay_ms: tuple[int, int] = (0, 20)
    copy_chance: float = 0.0
    copy_delay_ms: tuple[int, int] = (0, 400)
    move_ms: tuple[int, int] = (0, 60)


@dataclass(eq=False)
class PostedEnd:
    """One posted send or receive as the network knows it."""

    side: int
    touch: Callable[[PostedEnd], None]
    """Receiver: write from the matching sender. Sender: check that its pages are still its own."""
    done: Action
    revoked: Action
    lost: Action
    content: object = None
    matched: bool = False
    over: bool = False


@dataclass(eq=False)
class Link:
    """A control connection and a data endpoint between side 0 (context) and 1 (generation)."""

    clock: Clock
    rng: random.Random
    weather: Weather
    alive: tuple[Callable[[], bool], Callable[[], bool]]
    ranks: tuple[object, object]
    deliver: list[Callable[[SessionMessage], None]]
    closed: list[Callable[[str], None]]
    open: list[bool] = field(default_factory=lambda: [True, True])
    _last_ms: list[int] = field(default_factory=lambda: [0, 0])
    _queues: dict[tuple[int, int], deque[PostedEnd]] = field(default_factory=dict)
    _ends: list[PostedEnd] = field(default_factory=list)

    def send(self, side: int, message: SessionMessage) -> None:
        """Control message from ``side`` to the other."""
        if not self.open[side]:
            return
        other = 1 - side
        at_ms = max(
            self._last_ms[other], self.clock.now_ms + self.rng.randint(*self.weather.delay_ms)
        )
        self._last_ms[other] = at_ms
        self._schedule(at_ms, other, message)
        if self.rng.random() < self.weather.copy_chance:
            self._schedule(at_ms + self.rng.randint(*self.weather.copy_delay_ms), other, message)

    def _schedule(self, at_ms: int, other: int, message: SessionMessage) -> None:
        def arrive() -> None:
            if self.open[other] and self.alive[other]():
                self.deliver[other](message)

        self.clock.after(at_ms - self.clock.now_ms, arrive)

    def close(self, side: int, reason: str) -> None:
        """``side`` closes or notices the loss; the other notices after what was sent before."""
        if not self.open[side]:
            return
        self.open[side] = False
        other = 1 - side
        for end in self._ends:
            if end.side == side and not end.over:
                end.over = True
                self.clock.after(self.rng.randint(0, 30), end.lost if end.matched else end.revoked)
        if self.alive[side]():
            self.closed[side](reason)
        delay = max(self._last_ms[other] - self.clock.now_ms, 0) + self.rng.randint(0, 40)
        self.clock.after(delay, lambda: self.close(other, "peer closed"))

    def post(self, tag: int, end: PostedEnd) -> None:
        """Match in order of posting, tag by tag."""
        self._ends.append(end)
        if not self.open[end.side]:
            end.over = True
            self.clock.after(0, end.revoked)
            return
        waiting = self._queues.setdefault((tag, 1 - end.side), deque())
        if waiting:
            self._move(end, waiting.popleft())
        else:
            self._queues.setdefault((tag, end.side), deque()).append(end)

    def _move(self, one: PostedEnd, two: PostedEnd) -> None:
        sender, receiver = (one, two) if one.side == 0 else (two, one)
        if sender.over or receiver.over:
            return
        sender.matched = receiver.matched = True

        def touch() -> None:
            if self.alive[0]() and self.alive[1]():
                sender.touch(receiver)
                receiver.touch(sender)
                for end in (sender, receiver):
                    self.clock.after(self.rng.randint(0, 10), partial(finish, end))

        def finish(end: PostedEnd) -> None:
            if not end.over:
                end.over = True
                end.done()

        self.clock.after(self.rng.randint(*self.weather.move_ms), touch)
