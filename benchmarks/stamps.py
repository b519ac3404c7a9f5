"""When each token of a ``generate`` of transformers is there."""

from __future__ import annotations

import time

import torch
from transformers.generation.streamers import BaseStreamer


class Stamps(BaseStreamer):  # type: ignore[misc]
    """``times``: of every token on the host, in seconds of ``time.perf_counter``."""

    def __init__(self) -> None:
        self._puts: list[float] = []

    @property
    def times(self) -> list[float]:
        # The first put is the prompt itself.
        return self._puts[1:]

    def put(self, value: torch.Tensor) -> None:
        self._puts.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""
