"""How long the engine thread waits for Python's interpreter, which it shares with the IO thread.

Every tensor operation lets the interpreter go and takes it back, so what another thread computes in
Python lengthens each step. Once a step, before its tensor operations and after the outputs of the
last one woke the IO thread, the engine lets go on purpose and the time until it has the interpreter
again is counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Final, Protocol

from typing_extensions import override

WAIT_BOUNDS_US: Final = (20, 50, 100, 200, 300, 400, 500, 750, 1000, 2000, 5000, 20000)
"""Upper ends of the classes of waits; one more class has no end."""
WAIT_CLASSES: Final = len(WAIT_BOUNDS_US) + 1


class Interpreter(Protocol):
    """Lets other threads run Python once."""

    def share(self) -> None:
        """Let go and take back."""

    @property
    def waits(self) -> tuple[int, ...]:
        """How many waits fell into each class of :data:`WAIT_BOUNDS_US`, and one above all."""

    @property
    def waited_us(self) -> int:
        """All waits together."""


class OnlyThread(Interpreter):
    """Nobody to share with: what a simulation runs on."""

    @override
    def share(self) -> None:
        return

    @property
    @override
    def waits(self) -> tuple[int, ...]:
        return (0,) * WAIT_CLASSES

    @property
    @override
    def waited_us(self) -> int:
        return 0


class SharedInterpreter(Interpreter):
    """This process's. Used by the engine thread only."""

    def __init__(self) -> None:
        self._counts = [0] * WAIT_CLASSES
        self._waited_ns = 0

    @override
    def share(self) -> None:
        started = time.perf_counter_ns()
        time.sleep(0)
        waited = time.perf_counter_ns() - started
        self._waited_ns += waited
        self._counts[bisect_left(WAIT_BOUNDS_US, waited / 1000)] += 1

    @property
    @override
    def waits(self) -> tuple[int, ...]:
        return tuple(self._counts)

    @property
    @override
    def waited_us(self) -> int:
        return self._waited_ns // 1000
