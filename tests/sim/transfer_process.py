"""One process: it runs what comes in order, stands still while paused, and is gone when killed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from tests.sim.transfer_network import Action, Clock
from transfer.identity import RankId

CONTEXT, GENERATION = 0, 1


class Process:
    """``side`` says which end of its links it is."""

    def __init__(self, side: int, rank_id: RankId, clock: Clock, rng: random.Random) -> None:
        self.side = side
        self.rank_id = rank_id
        self.clock = clock
        self.rng = rng
        self.alive = True
        self.was_paused = False
        self._paused_until_ms = 0
        self._turn_ms = 0
        self._backlog: deque[Action] = deque()

    @property
    def name(self) -> str:
        return str(self.rank_id)

    @property
    def paused(self) -> bool:
        return self._paused_until_ms > self.clock.now_ms

    def pause(self, pause_ms: int) -> None:
        """Stand still for a while."""
        self.was_paused = True
        self._paused_until_ms = max(self._paused_until_ms, self.clock.now_ms + pause_ms)
        self.clock.after(self._paused_until_ms - self.clock.now_ms, self._wake)

    def run(self, action: Action) -> None:
        """Now, when the process goes on, or never."""
        if not self.alive:
            return
        if self.paused or self._backlog:
            self._backlog.append(action)
        else:
            action()

    def later(self, range_ms: tuple[int, int], action: Action) -> None:
        """Run after a random time."""
        self.clock.after(self.rng.randint(*range_ms), partial(self.run, action))

    def soon(self, action: Callable[[], None]) -> None:
        """Run in a later turn."""
        self.clock.after(0, partial(self.run, action))

    def in_turn(self, range_ms: tuple[int, int], action: Action) -> None:
        """Run after a random time, but not before what was given here earlier; at once when there
        is nothing to wait for.
        """
        wait_ms = self.rng.randint(*range_ms)
        self._turn_ms = max(self._turn_ms, self.clock.now_ms + wait_ms)
        if range_ms[1]:
            self.clock.after(self._turn_ms - self.clock.now_ms, partial(self.run, action))
        else:
            action()

    def _wake(self) -> None:
        while self._backlog and self.alive and not self.paused:
            self._backlog.popleft()()
