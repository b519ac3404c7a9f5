"""Limits of steps by device."""

from __future__ import annotations

import pytest

from services.config import ServeConfig
from services.errors import ConfigError
from services.resources import Gpu, Machine, plan_instances
from services.step_limits import ON_CPU, ON_GPU, StepLimits, check_step_ways, step_limits

GIB = 1 << 30
ONE_CPU = Machine(cores=2, available_bytes=8 * GIB)
GPUS = Machine(cores=8, available_bytes=64 * GIB, gpus=(Gpu(name="H", free_bytes=100 * GIB),) * 4)


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


@pytest.mark.parametrize(
    ("machine", "fields", "told"),
    [
        (ONE_CPU, {"decode_graphs": True}, "decode_graphs: .* context-0 on a CPU"),
        (GPUS, {"decode_graphs": True, "attention_dp_size": 2}, "decode_graphs: .* attention_dp"),
        (GPUS, {"steps_under_way": 2, "attention_dp_size": 2}, "steps_under_way: .* got 2"),
    ],
)
def test_what_no_worker_could_do_is_refused_before_one_starts(
    machine: Machine, fields: dict[str, object], told: str
) -> None:
    config = ServeConfig.model_validate({"context": 1, "generation": 1, **fields})
    plans = plan_instances(config, machine, weights_bytes=GIB)
    with pytest.raises(ConfigError, match=told):
        check_step_ways(config, plans)


@pytest.mark.parametrize(
    ("machine", "fields"),
    [
        (ONE_CPU, {}),
        (ONE_CPU, {"steps_under_way": 2, "decode_graphs": False}),
        (GPUS, {"decode_graphs": True, "steps_under_way": 2, "tensor_parallel_size": 2}),
        (GPUS, {"attention_dp_size": 2}),
    ],
)
def test_other_ways_are_the_workers_to_judge(machine: Machine, fields: dict[str, object]) -> None:
    config = ServeConfig.model_validate({"context": 1, "generation": 1, **fields})
    check_step_ways(config, plan_instances(config, machine, weights_bytes=GIB))
