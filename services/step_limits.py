"""How much a step of an instance takes: what was configured, else what suits its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.config import ServeConfig


@dataclass(frozen=True)
class StepLimits:
    """``tokens`` of one step and ``sequences`` of one step, at most."""

    tokens: int
    sequences: int


ON_CPU: Final = StepLimits(tokens=512, sequences=64)
ON_GPU: Final = StepLimits(tokens=2048, sequences=256)
"""A step of as many tokens keeps a GPU's matrix units busy; one of more holds up those who decode
beside it, and has less of a prompt's pages on their way before the prompt is through.
"""


def step_limits(config: ServeConfig, device: str) -> StepLimits:
    """Of instances on this device."""
    suited = ON_CPU if device == "cpu" else ON_GPU
    return StepLimits(
        tokens=suited.tokens if config.max_batch_tokens is None else config.max_batch_tokens,
        sequences=suited.sequences if config.max_running is None else config.max_running,
    )
