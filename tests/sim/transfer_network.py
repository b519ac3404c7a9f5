"""A virtual clock and links between ranks that delay, hold up, duplicate, cut and lose.

A link is one control connection and one data endpoint. Control messages of one direction arrive in
order (copies arrive late), pages of different tags and control messages overtake each other, and
so do links. A page move touches the pages of both ends at one random moment after both were
posted. Where remote access is possible it may do so as long as either process is not through with
it, whatever the other was told; else as long as both are not.
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
from transfer.outcome import PostStatus

Action = Callable[[], object]


class Clock:
    """Runs actions in order of virtual milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._numbers = count()

    def after(self, delay_ms: int, action: Action) -> None:
        heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._numbers), action))

    def run(self, most_actions: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_actions):
            if not self._heap:
                return
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
        raise AssertionError("the simulation does not come to rest")


@dataclass(frozen=True)
class Weather:
    """How bad the network is; ranges of milliseconds, both ends included."""

    delay_ms: tuple[int, int] = (0, 20)
    copy_chance: float = 0.0
    copy_delay_ms: tuple[int, int] = (0, 400)
    move_ms: tuple[int, int] = (0, 60)
    finish_ms: tuple[int, int] = (0, 10)
    """From the move of a page until an end is told."""
    notice_ms: tuple[int, int] = (0, 60)
    """From a break until an end notices."""
    death_told_ms: tuple[int, int] = (0, 800)
    """From a death until the others are told."""
    teardown_ms: tuple[int, int] = (0, 30)
    """From the close of an end until its data endpoint is closed."""
    endings_ms: tuple[int, int] = (0, 30)
    """From the close of an end until its requests are told as ended."""
    remote_access: bool = True
    """Whether a peer's process can itself reach pages: then a broken request is LOST."""


@dataclass(eq=False)
class PostedEnd:
    """One posted send or receive as the network knows it."""

    side: int
    touch: Callable[[PostedEnd], None]
    """Sender: read its pages. Receiver: write what the sender read."""
    told: Callable[[PostStatus], None]
    reaches: Callable[[], bool]
    """Whether its process lives and its endpoint is not closed yet."""
    content: object = None
    peer: PostedEnd | None = None
    moved: bool = False
    """All bytes are where they belong."""
    over: bool = False
    """It was told."""
    lost: bool = False

    @property
    def under_way(self) -> bool:
        """Whether its process may still work on it."""
        return not self.over and self.reaches()

    @property
    def touchable(self) -> bool:
        """Whether anybody may still touch its memory."""
        if not self.lost:
            return self.under_way
        return self.peer is not None and self.peer.under_way

    def end(self, status: PostStatus) -> None:
        """Tell it, unless it was told."""
        if not self.over:
            self.over = True
            self.lost = status is PostStatus.LOST
            self.told(status)


@dataclass(eq=False)
class Link:
    """Between side 0 (context) and side 1 (generation)."""

    clock: Clock
    rng: random.Random
    weather: Weather
    alive: tuple[Callable[[], bool], Callable[[], bool]]
    deliver: list[Callable[[SessionMessage], None]] = field(default_factory=list)
    closed: list[Callable[[str], None]] = field(default_factory=list)
    open: list[bool] = field(default_factory=lambda: [True, True])
    torn_down: list[bool] = field(default_factory=lambda: [False, False])
    """Ends whose data endpoint is closed: nothing of theirs touches memory any more."""
    is_cut: bool = False
    held_up: int = 0
    """Messages and moves that a hold has made late."""
    copies: int = 0
    """Messages that arrived a second time."""
    vanished: int = 0
    """Messages under way, or sent later, that a cut swallowed."""
    _held_until_ms: int = 0
    _last_ms: list[int] = field(default_factory=lambda: [0, 0])
    _lines: tuple[deque[SessionMessage], deque[SessionMessage]] = field(
        default_factory=lambda: (deque(), deque())
    )
    _queues: dict[tuple[int, int], deque[PostedEnd]] = field(default_factory=dict)
    _ends: list[PostedEnd] = field(default_factory=list)

    @property
    def moving(self) -> bool:
        """Whether pages are under way that both ends have posted."""
        return any(end.peer is not None and not end.moved for end in self._ends if not end.over)

    def send(self, side: int, message: SessionMessage) -> None:
        """Control message from ``side`` to the other."""
        if not self.open[side]:
            return
        other, now_ms = 1 - side, self.clock.now_ms
        at_ms = max(self._last_ms[other], now_ms + self.rng.randint(*self.weather.delay_ms))
        self._last_ms[other] = at_ms
        self._lines[other].append(message)
        self.clock.after(at_ms - now_ms, partial(self._arrive, other))
        if self.rng.random() < self.weather.copy_chance:
            later_ms = at_ms - now_ms + self.rng.randint(*self.weather.copy_delay_ms)
            self.clock.after(later_ms, partial(self._arrive_again, other, message))

    def cut(self) -> None:
        """What is under way and what is sent from now on is gone; each end notices in its time."""
        self.is_cut = True
        for side in (0, 1):
            self.clock.after(
                self.rng.randint(*self.weather.notice_ms), partial(self.close, side, "reset")
            )

    def hold(self, hold_ms: int) -> None:
        """Nothing arrives and no page moves for a while."""
        self._held_until_ms = max(self._held_until_ms, self.clock.now_ms + hold_ms)

    def close(self, side: int, reason: str) -> None:
        """``side`` closes or notices the loss; the other notices after what was sent before."""
        if not self.open[side]:
            return
        self.open[side] = False
        for end in self._ends:
            if end.side == side and not end.over:
                wait_ms = self.rng.randint(*self.weather.endings_ms)
                broken = self.weather.remote_access and end.peer is not None
                status = PostStatus.LOST if broken else PostStatus.REVOKED
                self.clock.after(wait_ms, partial(self._break, end, status))
        if self.alive[side]():
            self.closed[side](reason)
        other = 1 - side
        delay_ms = max(self._last_ms[other] - self.clock.now_ms, 0) + self.rng.randint(0, 40)
        self.clock.after(delay_ms, partial(self.close, other, "peer closed"))

    def post(self, tag: int, end: PostedEnd) -> None:
        """Match in order of posting, tag by tag."""
        self._ends.append(end)
        if not self.open[end.side]:
            self.clock.after(0, partial(end.end, PostStatus.REVOKED))
            return
        waiting = self._queues.get((tag, 1 - end.side))
        # What a closed end had not matched is revoked for good.
        if waiting and self.open[1 - end.side]:
            other = waiting.popleft()
            end.peer, other.peer = other, end
            self.clock.after(
                self.rng.randint(*self.weather.move_ms), partial(self._move, end, other)
            )
        else:
            self._queues.setdefault((tag, end.side), deque()).append(end)

    def _arrive(self, other: int) -> None:
        if self._late(partial(self._arrive, other)):
            return
        message = self._lines[other].popleft()
        if self.is_cut:
            self.vanished += 1
        elif self.open[other] and self.alive[other]():
            self.deliver[other](message)

    def _arrive_again(self, other: int, message: SessionMessage) -> None:
        if self.open[other] and not self.is_cut and self.alive[other]():
            self.copies += 1
            self.deliver[other](message)

    def _late(self, action: Action) -> bool:
        """Whether the link is held up: then ``action`` comes afterwards."""
        wait_ms = self._held_until_ms - self.clock.now_ms
        if wait_ms <= 0:
            return False
        self.held_up += 1
        self.clock.after(wait_ms, action)
        return True

    def _move(self, one: PostedEnd, two: PostedEnd) -> None:
        if self._late(partial(self._move, one, two)):
            return
        ends = (one, two)
        if not (self.alive[0]() and self.alive[1]()):
            return
        touches = any if self.weather.remote_access else all
        if not touches(end.under_way for end in ends):
            return
        sender, receiver = (one, two) if one.side == 0 else (two, one)
        sender.touch(receiver)
        receiver.touch(sender)
        for end in ends:
            end.moved = True
            if self.open[end.side]:
                self.clock.after(
                    self.rng.randint(*self.weather.finish_ms), partial(self._finish, end)
                )

    def _break(self, end: PostedEnd, status: PostStatus) -> None:
        """The end of a request whose endpoint was closed: it may have been through before."""
        through = end.moved and self.rng.random() < 0.5
        end.end(PostStatus.DONE if through else status)

    def _finish(self, end: PostedEnd) -> None:
        # A closing endpoint tells the end itself.
        if self.open[end.side]:
            end.end(PostStatus.DONE)
