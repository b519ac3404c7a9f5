"""Time of device work: on CUDA by events around replays of a graph, else by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

ROUNDS: Final = 5


def seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median time of one call, from an idle device until it is idle again."""
    samples = []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median device time of one call, without what the host takes to launch it.

    ``work`` is captured, so it must not wait for the device.
    """
    if device.type != "cuda":
        return seconds(work, device, 1)
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return replay_seconds(graph.replay)


def replay_seconds(replay: Callable[[], object]) -> float:
    """Median device time of one replay of a graph."""
    replay()
    cuda: Any = torch.cuda
    samples: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1000)
    return statistics.median(samples)


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written a second by a plain copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        return 2 * size / seconds(lambda: target.copy_(source), device, 1)
    # Not in a graph: a copy there is the copy engines' work, at two thirds of the rate.
    return 2 * size / replay_seconds(lambda: target.copy_(source))
