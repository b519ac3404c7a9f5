"""Seconds of a piece of device work: in a captured graph on CUDA, so that launches cost what they
cost in a captured step, and capture itself is tested.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

ROUNDS: Final = {"cuda": 9, "cpu": 1}
"""The interpreter's times mean nothing."""


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Median of several rounds; the first call, which compiles, is not counted."""
    work()
    if device.type != "cuda":
        return _median(lambda: _host(work), ROUNDS["cpu"])
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    found = _median(lambda: _device(graph), ROUNDS["cuda"])
    graph.reset()
    return found


def _median(once: Callable[[], float], rounds: int) -> float:
    return statistics.median(once() for _ in range(rounds))


def _host(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _device(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
