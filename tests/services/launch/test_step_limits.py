"""Limits of steps by device."""

from __future__ import annotations

import pytest

from services.config import ServeConfig
from services.step_limits import ON_CPU, ON_GPU, StepLimits, step_limits


@pytest.mark.parametrize(("device", "suited"), [("cpu", ON_CPU), ("cuda", ON_GPU)])
def test_limits_suit_the_device_unless_they_are_given(device: str, suited: StepLimits) -> None:
    assert step_limits(ServeConfig(), device) == suited
    auto = ServeConfig.model_validate({"max_batch_tokens": "auto", "max_running": "auto"})
    assert step_limits(auto, device) == suited
    assert step_limits(ServeConfig(max_batch_tokens=7), device) == StepLimits(7, suited.sequences)
    assert step_limits(ServeConfig(max_running=3), device) == StepLimits(suited.tokens, 3)


def test_a_gpu_takes_more() -> None:
    assert ON_GPU.tokens > ON_CPU.tokens
    assert ON_GPU.sequences > ON_CPU.sequences
