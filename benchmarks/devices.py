"""The device and the number format that a benchmark of one device is asked for."""

from __future__ import annotations

import argparse
from typing import Final

import torch

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``, as a torch.device."""
    parser.add_argument(
        "--device", type=device, default="cuda", help="cuda, or cpu to try the program out"
    )


def device(name: str) -> torch.device:
    """The device of that name; of several, the first."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)
