"""Time of device work: on CUDA by events around replays of a graph, else by the clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

ROUNDS: Final = 5


def once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device until it is idle again."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def device_seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median device time of one call, without what the host takes to launch it. The first call,
    which compiles, is not counted. On a CPU there is one call, by the clock.

    ``work`` is captured, so it must not wait for the device.
    """
    if device.type != "cuda":
        return once(work, device)
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    found = replay_seconds(graph.replay, rounds)
    graph.reset()
    return found


def replay_seconds(replay: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median device time of one replay of a graph."""
    replay()
    cuda: Any = torch.cuda
    samples: list[float] = []
    for _ in range(rounds):
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


def process_age_s() -> float:
    """Seconds since the system started this process, imports included."""
    since_boot = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    born = int(since_boot) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born
