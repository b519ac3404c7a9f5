"""How a machine is divided among instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.config import ServeConfig
from services.errors import ConfigError
from services.kv_cache import check_cache_holds_a_step, check_kv_types
from services.resources import (
    Gpu,
    Machine,
    available_memory_bytes,
    estimate_weights_bytes,
    plan_instances,
    plan_remote_instances,
    read_machine,
)

GIB = 1 << 30


def config(**values: Any) -> ServeConfig:
    return ServeConfig.model_validate(values)


def test_cpu_memory_and_cores_are_divided() -> None:
    plans = plan_instances(config(), Machine(cores=8, available_bytes=16 * GIB), weights_bytes=GIB)
    assert [(p.name, p.device, p.torch_threads, p.kv_cache_bytes) for p in plans] == [
        ("context-0", "cpu", 4, 2 * GIB),
        ("generation-0", "cpu", 4, 2 * GIB),
    ]


def test_every_instance_has_a_thread_however_many_there_are() -> None:
    machine = Machine(cores=2, available_bytes=64 * GIB)
    plans = plan_instances(config(context=3, generation=2), machine, weights_bytes=0)
    assert {plan.torch_threads for plan in plans} == {1}


def test_ranks_share_what_instances_would() -> None:
    machine = Machine(cores=8, available_bytes=16 * GIB)
    plans = plan_instances(config(generation_tensor_parallel_size=3), machine, weights_bytes=GIB)
    assert [(p.name, p.tensor_parallel_size, p.torch_threads, p.kv_cache_bytes) for p in plans] == [
        ("context-0", 1, 2, GIB),
        ("generation-0", 3, 2, GIB),
    ]
    plans = plan_instances(config(aggregated=1, tensor_parallel_size=2), machine, weights_bytes=0)
    assert [(p.name, p.tensor_parallel_size, p.torch_threads) for p in plans] == [
        ("aggregated-0", 2, 4)
    ]


def test_ranks_with_whole_attention() -> None:
    machine = Machine(cores=8, available_bytes=16 * GIB)
    shared = config(context_attention_dp_size=2, generation_tensor_parallel_size=2)
    plans = plan_instances(shared, machine, weights_bytes=GIB)
    shapes = [(p.name, p.tensor_parallel_size, p.attention_dp_size) for p in plans]
    assert shapes == [("context-0", 2, 2), ("generation-0", 2, 1)]
    gpus = tuple(Gpu(name="H", free_bytes=100 * GIB) for _ in range(4))
    machine = Machine(cores=8, available_bytes=16 * GIB, gpus=gpus)
    plan_instances(config(tensor_parallel_size=2), machine, weights_bytes=120 * GIB)
    with pytest.raises(ConfigError, match="got 0 B for 4 instances"):
        plan_instances(config(attention_dp_size=2), machine, weights_bytes=120 * GIB)
    # Each rank of the first has all heads of its requests, of the second half of them.
    tight = config(
        context_attention_dp_size=2,
        generation_tensor_parallel_size=2,
        kv_cache_bytes=3 << 20,
        max_batch_tokens=512,
    )
    plans = plan_instances(tight, machine, weights_bytes=GIB)
    check_cache_holds_a_step(tight, plans[1:], 4096)
    with pytest.raises(ConfigError, match="expected at least 4"):
        check_cache_holds_a_step(tight, plans, 4096)


def test_every_rank_has_a_gpu_of_its_own() -> None:
    gpus = tuple(Gpu(name="H", free_bytes=100 * GIB) for _ in range(4))
    machine = Machine(cores=8, available_bytes=16 * GIB, gpus=gpus)
    shared = config(tensor_parallel_size=2)
    plans = plan_instances(shared, machine, weights_bytes=100 * GIB)
    assert {plan.gpu_fraction for plan in plans} == {1.0}
    assert [(plan.kv_cache_bytes, plan.staging_pairs) for plan in plans] == [(None, 3)] * 2
    with pytest.raises(ConfigError, match="got 0 B for 4 instances on cuda"):
        plan_instances(shared, machine, weights_bytes=160 * GIB)  # half and the whole parts
    with pytest.raises(ConfigError, match="a GPU for each of 6 ranks, got 4"):
        plan_instances(config(tensor_parallel_size=2, context=2), machine, weights_bytes=GIB)


def test_a_share_of_a_gpu_excludes_a_size_and_needs_one_to_itself() -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes excludes kv_cache_fraction"):
        config(kv_cache_bytes="1GiB", kv_cache_fraction=0.5)
    machine = Machine(cores=2, available_bytes=GIB, gpus=(Gpu(name="H", free_bytes=100 * GIB),))
    sizes = [
        plan_instances(config(kv_cache_fraction=share), machine, 0)[0].kv_cache_bytes
        for share in (0.25, 0.5)
    ]
    assert None not in sizes
    assert sizes[0] is not None
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=1)
    single = config(aggregated=1, kv_cache_fraction=0.5)
    assert plan_instances(single, machine, 0)[0].kv_cache_bytes is None
    on_cpu = config(device="cpu", kv_cache_fraction=0.5)
    with pytest.raises(ConfigError, match="kv_cache_fraction: expected instances on GPUs"):
        plan_instances(on_cpu, machine, 0)
    given = config(aggregated=1, kv_cache_bytes="1GiB")
    assert plan_instances(given, machine, 0)[0].kv_cache_bytes == GIB


def test_explicit_values_win() -> None:
    machine = Machine(cores=8, available_bytes=GIB)
    plans = plan_instances(
        config(kv_cache_bytes="512MiB", torch_threads=3), machine, weights_bytes=0
    )
    assert {(plan.kv_cache_bytes, plan.torch_threads) for plan in plans} == {(512 << 20, 3)}


@pytest.mark.parametrize(("gpus", "fraction"), [(1, 0.5), (2, 1.0), (4, 1.0)])
def test_instances_share_gpus(gpus: int, fraction: float) -> None:
    machine = Machine(
        cores=8,
        available_bytes=16 * GIB,
        gpus=tuple(Gpu(name="H", free_bytes=100 * GIB) for _ in range(gpus)),
    )
    plans = plan_instances(config(), machine, weights_bytes=10 * GIB)
    assert {(plan.device, plan.gpu_fraction) for plan in plans} == {("cuda", fraction)}
    # Four messages of a thousandth of the memory, for pages to and from the other instance.
    expected = int((50 * GIB - 11 * GIB - 4 * (100 << 20)) * 0.9)
    assert {plan.kv_cache_bytes for plan in plans} == {expected if gpus == 1 else None}


def test_three_instances_fit_on_one_gpu_by_their_fractions() -> None:
    machine = Machine(cores=8, available_bytes=GIB, gpus=(Gpu(name="H", free_bytes=100 * GIB),))
    plans = plan_instances(config(aggregated=3), machine, weights_bytes=0)
    assert sum(plan.gpu_fraction for plan in plans) <= 1.0


def test_cpu_can_be_asked_for_beside_a_gpu() -> None:
    machine = Machine(
        cores=8, available_bytes=16 * GIB, gpus=(Gpu(name="H", free_bytes=100 * GIB),)
    )
    plans = plan_instances(config(device="cpu"), machine, weights_bytes=0)
    assert {(plan.device, plan.gpu_fraction) for plan in plans} == {("cpu", 0.0)}


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a CUDA device"):
        plan_instances(config(device="cuda"), Machine(cores=1, available_bytes=GIB), 0)


def test_too_little_memory_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: expected at least .* free some memory"):
        plan_instances(config(), Machine(cores=1, available_bytes=1 << 20), 0)
    small = Machine(cores=1, available_bytes=GIB, gpus=(Gpu(name="H", free_bytes=8 * GIB),))
    with pytest.raises(ConfigError, match="on cuda"):
        plan_instances(config(), small, weights_bytes=7 * GIB)


def test_host_memory_for_pages_comes_out_of_what_is_free() -> None:
    machine = Machine(cores=2, available_bytes=16 * GIB)
    without = plan_instances(config(), machine, weights_bytes=0)
    beside = plan_instances(config(host_cache_bytes="1GiB"), machine, weights_bytes=0)
    assert without[0].kv_cache_bytes == (beside[0].kv_cache_bytes or 0) + GIB
    with pytest.raises(ConfigError, match=r"got 0 B .* lower host_cache_bytes"):
        plan_instances(config(host_cache_bytes="9GiB"), machine, 0)
    with pytest.raises(ConfigError, match="host_cache_bytes: expected what fits"):
        plan_instances(config(host_cache_bytes="9GiB", kv_cache_bytes="1GiB"), machine, 0)


def test_a_kv_cache_beyond_the_free_memory_is_refused_with_both_numbers() -> None:
    machine = Machine(cores=2, available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=r"free memory of 8\.0 GiB, got 2 times 5\.0 GiB"):
        plan_instances(config(kv_cache_bytes="5GiB"), machine, weights_bytes=0)
    with pytest.raises(ConfigError, match=r"got 2 times 3\.0 GiB and 2\.0 GiB"):
        plan_instances(config(kv_cache_bytes="3GiB", host_cache_bytes="2GiB"), machine, 0)
    gpus = (Gpu(name="H", free_bytes=8 * GIB),)
    machine = Machine(cores=2, available_bytes=64 * GIB, gpus=gpus)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: .* 8\.0 GiB, got 2 times 5\.0 GiB"):
        plan_instances(config(kv_cache_bytes="5GiB"), machine, weights_bytes=0)
    plan_instances(config(kv_cache_bytes="3GiB", host_cache_bytes="16GiB"), machine, 0)


def test_a_kv_cache_without_room_for_one_step_is_refused() -> None:
    machine = Machine(cores=2, available_bytes=8 * GIB)
    small = config(kv_cache_bytes=512 * 46080 - 1)
    plans = plan_instances(small, machine, weights_bytes=0)
    with pytest.raises(ConfigError, match=r"at least 22\.5 MiB.*512 tokens.*got 22\.5 MiB"):
        check_cache_holds_a_step(small, plans, 46080 // 4)
    check_cache_holds_a_step(small, plans, None)
    half = config(kv_cache_bytes=512 * 46080 - 1, dtype="bfloat16")
    check_cache_holds_a_step(half, plans, 46080 // 4)


def test_fp8_takes_a_quarter_of_float32() -> None:
    tight = config(kv_cache_bytes="2MiB", kv_cache_dtype="fp8")
    plans = plan_instances(tight, Machine(cores=2, available_bytes=GIB), 0)
    check_cache_holds_a_step(tight, plans, 4096)
    with pytest.raises(ConfigError, match=r"at least 8.0 MiB.*got 2.0 MiB"):
        check_cache_holds_a_step(config(kv_cache_bytes="2MiB"), plans, 4096)


def test_a_kv_type_that_the_model_does_not_compute_in_is_refused() -> None:
    gpus = (Gpu(name="H", free_bytes=100 * GIB),)
    gpu = plan_instances(config(), Machine(cores=8, available_bytes=GIB, gpus=gpus), 0)
    cpu = plan_instances(config(), Machine(cores=2, available_bytes=GIB), 0)
    half = {"dtype": "float16", "kv_cache_dtype": "float16"}
    for fitting in ({}, {"kv_cache_dtype": "fp8"}, half):
        check_kv_types(config(**fitting), (*cpu, *gpu))
    check_kv_types(config(kv_cache_dtype="bfloat16"), gpu)  # the checkpoint decides
    check_kv_types(config(kv_cache_dtype="float32"), cpu)
    for given, plans, expected in (
        ({"kv_cache_dtype": "bfloat16"}, cpu, "float32"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float16"}, gpu, "float16"),
    ):
        with pytest.raises(ConfigError, match=f"expected auto, fp8 or {expected}"):
            check_kv_types(config(**given), plans)


def test_a_remote_cluster_needs_what_cannot_be_looked_up() -> None:
    with pytest.raises(ConfigError, match="expected a value for device, kv_cache_bytes, torch"):
        plan_remote_instances(config(ray_address="auto"))
    plans = plan_remote_instances(
        config(ray_address="auto", device="cuda", kv_cache_bytes="1GiB", torch_threads=2)
    )
    assert {(p.device, p.gpu_fraction, p.kv_cache_bytes) for p in plans} == {("cuda", 1.0, GIB)}
    measured = config(ray_address="auto", device="cuda", torch_threads=2)
    assert {(p.kv_cache_bytes, p.staging_pairs) for p in plan_remote_instances(measured)} == {
        (None, 1)
    }


def test_weights_are_estimated_from_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1_000))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(500))
    assert estimate_weights_bytes(tmp_path) == 1_500
    quantised = tmp_path / "model.gguf"
    quantised.write_bytes(bytes(100))
    assert estimate_weights_bytes(quantised) == 400


def test_this_machine_has_something() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert machine.available_bytes == pytest.approx(available_memory_bytes(), rel=0.5)
