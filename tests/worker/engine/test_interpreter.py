"""The engine thread's waits for the interpreter."""

from __future__ import annotations

import sys
import threading

from tests.support.sim_engines import SimWorld, generate
from worker.interpreter import WAIT_BOUNDS_US, SharedInterpreter

LONG_S = 0.005
TRIES = 2000


def test_nobody_else_computes() -> None:
    interpreter = SharedInterpreter()
    for _ in range(10):
        interpreter.share()
    assert sum(interpreter.waits) == 10


def test_a_thread_that_keeps_the_interpreter_is_seen() -> None:
    interpreter = SharedInterpreter()
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(LONG_S)
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        long = next(index for index, end in enumerate(WAIT_BOUNDS_US) if end >= LONG_S * 1e6 / 2)
        # The other thread may be slow to wake, but not always.
        tries = iter(range(TRIES))
        while not sum(interpreter.waits[long:]) and next(tries, None) is not None:
            interpreter.share()
        assert sum(interpreter.waits[long:]) > 0
        assert interpreter.waited_us >= LONG_S * 1e6 / 2
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_the_engine_shares_it_once_a_step() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("r", list(range(10)), max_tokens=5))
    world.drain()
    assert worker.gauges is not None
    assert worker.gauges.steps_total >= 5
    assert sum(worker.gauges.interpreter_waits) == worker.gauges.steps_total
