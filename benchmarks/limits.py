"""What a device can do at most, measured in the run that is judged by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.timing import device_seconds, once, replay_seconds

COPY_BYTES: Final = {"cuda": 4 << 30, "cpu": 1 << 20}
MATMUL_SIDE: Final = {"cuda": 8192, "cpu": 64}


@dataclass(frozen=True)
class Limits:
    """``copy_gb_s``: bytes read and written by a plain copy. ``matmul_tflop_s``: a square product
    in bfloat16.
    """

    copy_gb_s: float
    matmul_tflop_s: float


def measure(device: torch.device) -> Limits:
    """Both, with sizes that no cache holds; tiny ones on a CPU, where they mean nothing."""
    copy = _copy_bandwidth(device, COPY_BYTES[device.type])
    side = MATMUL_SIDE[device.type]
    left = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    product = device_seconds(lambda: torch.mm(left, left, out=out), device)
    return Limits(_shown(copy / 1e9), _shown(2 * side**3 / product / 1e12))


def _copy_bandwidth(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        return 2 * size / once(lambda: target.copy_(source), device)
    # Not in a graph: a copy there is the copy engines' work, at two thirds of the rate.
    return 2 * size / replay_seconds(lambda: target.copy_(source))


def _shown(rate: float) -> float:
    """Five digits, wherever its point is: what others are divided by must not become 0."""
    return float(f"{rate:.5g}")
