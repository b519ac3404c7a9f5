"""How steps run: what was asked for, the best where nothing was, a refusal by name otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from transfer.identity import Incarnation
from worker.config import WorkerConfig
from worker.core import load_core
from worker.step_ways import StepMeans, StepWays, step_ways

GPU = StepMeans(on_gpu=True, no_graphs=None, has_states=False)
MIXTURE = StepMeans(on_gpu=True, no_graphs="a model of family mixtral", has_states=False)
HYBRID = StepMeans(on_gpu=True, no_graphs="a model of family lfm2", has_states=True)
CPU = StepMeans(on_gpu=False, no_graphs="device cpu", has_states=False)
TP = {"tensor_parallel_size": 2}
DP = {"tensor_parallel_size": 2, "attention_dp_size": 2}


def config(**fields: object) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {
            "incarnation": Incarnation.mint("a"),
            "role": "aggregated",
            "model_path": "nowhere",
            "model_name": "tiny",
            "cluster_token": "test token",
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("means", "fields", "expected"),
    [
        (GPU, {}, StepWays(decode_graphs=True, under_way=2)),
        (MIXTURE, {}, StepWays(decode_graphs=False, under_way=2)),
        (HYBRID, {}, StepWays(decode_graphs=False, under_way=1)),
        (CPU, {}, StepWays(decode_graphs=False, under_way=1)),
        (GPU, TP, StepWays(decode_graphs=False, under_way=2)),
        (GPU, DP, StepWays(decode_graphs=False, under_way=1)),
        (GPU, {"decode_graphs": False}, StepWays(decode_graphs=False, under_way=2)),
        (GPU, {"steps_under_way": 1}, StepWays(decode_graphs=True, under_way=1)),
        (GPU, {**TP, "decode_graphs": True}, StepWays(decode_graphs=True, under_way=2)),
        (CPU, {"steps_under_way": 2}, StepWays(decode_graphs=False, under_way=2)),
        (HYBRID, {"steps_under_way": 1}, StepWays(decode_graphs=False, under_way=1)),
        (GPU, {**DP, "decode_graphs": False}, StepWays(decode_graphs=False, under_way=1)),
    ],
)
def test_ways(means: StepMeans, fields: dict[str, object], expected: StepWays) -> None:
    assert step_ways(config(**fields), means) == expected


@pytest.mark.parametrize(
    ("means", "fields", "told"),
    [
        (CPU, {"decode_graphs": True}, "decode_graphs: .*device cpu"),
        (MIXTURE, {"decode_graphs": True}, "decode_graphs: .*family mixtral"),
        (GPU, {**DP, "decode_graphs": True}, "decode_graphs: .*attention_dp_size"),
        (HYBRID, {"steps_under_way": 2}, "steps_under_way: .*recurrent states"),
        (GPU, {**DP, "steps_under_way": 2}, "steps_under_way: .*attention_dp_size"),
    ],
)
def test_what_cannot_be_had_is_refused(
    means: StepMeans, fields: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        step_ways(config(**fields), means)


def test_a_worker_tells_its_ways_and_refuses_others(tiny_model: Callable[[str], Path]) -> None:
    told: list[str] = []
    fields = {"model_path": str(tiny_model("llama")), "kv_cache_bytes": 1 << 20}
    load_core(config(**fields), None, told.append)
    assert any("decodes launch by launch, 1 under way" in line for line in told)
    with pytest.raises(ValueError, match=r"decode_graphs: expected .* got device cpu"):
        load_core(config(**fields, decode_graphs=True), None, told.append)
