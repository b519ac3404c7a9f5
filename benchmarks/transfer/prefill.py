"""What stands for a prefill: a thread that multiplies matrices, as an engine thread would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

ROWS: Final = 256
WIDTH: Final = 2048
CALM_S: Final = 0.3
"""How long the prefill runs alone to learn its own speed."""


class Prefill:
    """Steps of one matrix product each, on ``device``."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._rows = torch.ones(ROWS, WIDTH, device=self._device)
        self._weight = torch.ones(WIDTH, WIDTH, device=self._device)

    def enter_thread(self) -> None:
        """Steps follow in this thread: the device's context must be current there for cuBLAS."""
        self._settle()

    def step(self) -> None:
        """One product, waited for."""
        torch.mm(self._rows, self._weight)
        self._settle()

    def compute(self, seconds: float) -> None:
        """Steps for so long."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.step()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PrefillLoad:
    """A prefill that goes on until it is stopped."""

    def __init__(self, device: str) -> None:
        self._prefill = Prefill(device)
        self._stopping = False
        self._steps = 0
        self._since = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def restart_count(self) -> float:
        """Steps a second since the last call."""
        now, steps = time.perf_counter(), self._steps
        speed = steps / (now - self._since)
        self._since, self._steps = now, 0
        return speed

    def stop(self) -> None:
        """Wait for the last step."""
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        self._prefill.enter_thread()
        while not self._stopping:
            self._prefill.step()
            self._steps += 1


class ChunkedPrefill:
    """A prompt computed chunk by chunk in a thread of its own."""

    def __init__(
        self,
        device: str,
        chunk_s: Sequence[float],
        finished: Callable[[int], None],
    ) -> None:
        """``finished`` is called in the thread with the number of each chunk."""
        self._prefill = Prefill(device)
        self._chunk_s = chunk_s
        self._finished = finished
        self.last_done = 0.0
        """Clock when the last chunk was computed."""
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the last chunk was given."""
        self._thread.join()

    def _run(self) -> None:
        self._prefill.enter_thread()
        for number, seconds in enumerate(self._chunk_s):
            self._prefill.compute(seconds)
            self.last_done = time.perf_counter()
            self._finished(number)
