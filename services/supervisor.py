"""When to start an instance again: pure decisions over times, one policy object an instance.

Each start is a new incarnation. A start that fails before the instance has ever been up is final (a
wrong model does not get better by trying); after that an instance is started again for ever, with a
back-off that grows while it keeps dying and is forgotten once it has lived for a while. No clock
and no IO in here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

FIRST_BACKOFF_MS: Final = 200
MAX_BACKOFF_MS: Final = 30_000
STABLE_AFTER_MS: Final = 60_000
"""An instance that lived this long starts over at the first back-off."""


class Phase(Enum):
    """Where an instance is."""

    WAITING = "waiting"
    STARTING = "starting"
    UP = "up"
    GIVEN_UP = "given up"


@dataclass(frozen=True)
class Supervision:
    """State of one instance. Events return the next state; ``start_at_ms`` says when to start while
    WAITING."""

    phase: Phase = Phase.WAITING
    start_at_ms: int = 0
    starts: int = 0
    """Incarnations so far."""
    failures: int = 0
    """Deaths in a row without a stable life in between."""
    up_since_ms: int = 0
    ever_up: bool = False

    def started(self) -> Supervision:
        """A new incarnation is being started."""
        self._expect(Phase.WAITING)
        return replace(self, phase=Phase.STARTING, starts=self.starts + 1)

    def came_up(self, now_ms: int) -> Supervision:
        """The incarnation listens and has its model loaded."""
        self._expect(Phase.STARTING)
        return replace(self, phase=Phase.UP, up_since_ms=now_ms, ever_up=True)

    def died(self, now_ms: int) -> Supervision:
        """The incarnation ended, whatever it was doing."""
        if self.phase is Phase.STARTING and not self.ever_up:
            return replace(self, phase=Phase.GIVEN_UP)
        if self.phase is Phase.UP and now_ms - self.up_since_ms >= STABLE_AFTER_MS:
            failures = 1
        elif self.phase in (Phase.UP, Phase.STARTING):
            failures = self.failures + 1
        else:
            raise ValueError(f"an instance that is {self.phase.value} cannot die")
        return replace(
            self,
            phase=Phase.WAITING,
            failures=failures,
            start_at_ms=now_ms + backoff_ms(failures),
        )

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise ValueError(
                f"expected an instance that is {phase.value}, it is {self.phase.value}"
            )


def backoff_ms(failures: int) -> int:
    """Wait before the next start after ``failures`` (>= 1) deaths in a row."""
    return int(min(MAX_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** min(failures - 1, 20)))
