"""How much a step of an instance takes: what was configured, else what suits its device. What no
worker could do is refused before one is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.config import ServeConfig
from services.errors import ConfigError
from services.resources import InstancePlan


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


def check_step_ways(config: ServeConfig, plans: Sequence[InstancePlan]) -> None:
    """Raises ConfigError for steps that an instance cannot take whatever its model is."""
    for plan in plans:
        shared = plan.attention_dp_size > 1
        if config.decode_graphs and (plan.device == "cpu" or shared):
            got = "attention_dp_size above 1" if shared else f"{plan.name} on a CPU"
            raise ConfigError(
                f"decode_graphs: expected instances on GPUs that have them, got {got}; leave "
                "--decode-graphs out"
            )
        if config.steps_under_way == 2 and shared:
            raise ConfigError(
                "steps_under_way: expected 1 with attention_dp_size above 1, got 2; leave "
                "--steps-under-way out"
            )
