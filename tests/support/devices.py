"""Where a parametrised test runs: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

from typing import Final

import pytest
import torch

DEVICES: Final = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

SEVERAL_DEVICES: Final = ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu))
"""The same for tests that want a GPU a rank."""


def usable(device: str) -> str:
    """The device, or a skip (a failure under ``--require-gpu``) when it is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device


def usable_for(device: str, ranks: int) -> tuple[str, ...]:
    """A device for each of several ranks, likewise: NCCL wants a GPU a rank."""
    if usable(device) == "cpu":
        return ("cpu",) * ranks
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices, {ranks} are needed")
    return tuple(f"{device}:{rank}" for rank in range(ranks))
