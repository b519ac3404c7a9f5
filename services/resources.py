"""What this machine has, and how it is divided among the instances.

``plan_instances`` is pure: values in, one :class:`InstancePlan` an instance out, so that a plan can
be shown and tested without a machine. Readers of the machine are at the end of the file. Loads no
torch: GPUs are asked for in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.config import ServeConfig
from services.environment import child_environment
from services.errors import ConfigError, StartError
from services.units import format_bytes
from transfer.staging_buffers import device_staging_bytes
from worker.messages import WorkerRole

CPU_MEMORY_SHARE: Final = 0.25
"""Of the available memory: the rest is for weights, activations and everything else that runs
here."""
GPU_CACHE_FRACTION: Final = 0.9
"""Of a GPU's memory that is left beside weights, a step and transfers."""
GPU_ACTIVATION_BYTES: Final = 1 << 30
"""Kept free on a GPU for each instance beside its weights."""
WHOLE_WEIGHTS_SHARE: Final = 0.15
"""Of a model's weights, at most, what each of several ranks has whole: embedding and head."""
WHOLE_ATTENTION_SHARE: Final = 0.35
"""The same of attention, where each rank has all of it."""
MIN_KV_CACHE_BYTES: Final = 16 << 20
GPU_PROBE_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device of this machine."""

    name: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What can be divided."""

    cores: int
    available_bytes: int
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    """One instance: its name never changes, its incarnations do."""

    name: str
    role: WorkerRole
    device: str
    """``cpu`` or ``cuda``; which GPU is decided by Ray through CUDA_VISIBLE_DEVICES."""
    gpu_fraction: float
    torch_threads: int
    kv_cache_bytes: int | None
    """Of each rank. None: it measures what its GPU has for it."""
    tensor_parallel_size: int = 1
    attention_dp_size: int = 1
    staging_pairs: int = 0
    """Other ranks that pages may travel to or from."""


def plan_instances(
    config: ServeConfig, machine: Machine, weights_bytes: int
) -> tuple[InstancePlan, ...]:
    """Divide ``machine`` among the instances of ``config``. Raises ConfigError when there is too
    little of something."""
    count = _ranks(config)
    largest = max(config.ranks_of(role) for role, _ in config.instances)
    least_ranks = min(config.ranks_of(role) for role, _ in config.instances)
    device = _device(config, machine)
    _check_fraction(config, device)
    threads = config.torch_threads or max(1, machine.cores // count)
    gpu_fraction = 0.0
    is_measured = False
    if device == "cuda":
        per_gpu = -(-count // len(machine.gpus))
        if largest > 1 and per_gpu > 1:
            raise ConfigError(
                f"tensor_parallel_size: expected a GPU for each of {count} ranks, got "
                f"{len(machine.gpus)}; start fewer instances or give each fewer ranks"
            )
        if least_ranks > 1:
            whole = WHOLE_WEIGHTS_SHARE
            if any(config.dp_size_of(role) > 1 for role, _ in config.instances):
                whole += WHOLE_ATTENTION_SHARE
            weights_bytes = int(weights_bytes * min(1.0, 1 / least_ranks + whole))
        # Ray packs by fractions: rounding down keeps `per_gpu` instances on one GPU possible.
        gpu_fraction = int(1_000 / per_gpu) / 1_000
        smallest = min(gpu.free_bytes for gpu in machine.gpus)
        share = smallest // per_gpu - weights_bytes - GPU_ACTIVATION_BYTES
        # Any instance may move pages to or from any other.
        share -= device_staging_bytes(smallest, count - 1)
        share = int(share * kv_cache_fraction(config))
        # Of several that load at once on one GPU none could tell what is free.
        is_measured = per_gpu == 1 and config.kv_cache_bytes is None
    else:
        share = int(machine.available_bytes * CPU_MEMORY_SHARE) // count - config.host_cache_bytes
    if config.kv_cache_bytes is None and share < MIN_KV_CACHE_BYTES:
        # On a GPU it takes nothing from the cache.
        lower = "lower host_cache_bytes, " if config.host_cache_bytes and device == "cpu" else ""
        raise ConfigError(
            f"kv_cache_bytes: expected at least {format_bytes(MIN_KV_CACHE_BYTES)} an instance, "
            f"got {format_bytes(max(0, share))} for {count} instances on {device}; "
            f"free some memory, start fewer instances, {lower}or set kv_cache_bytes"
        )
    kv_cache_bytes = config.kv_cache_bytes or share
    _check_fit(config, machine, device, kv_cache_bytes)
    return tuple(
        InstancePlan(
            name=name,
            role=role,
            device=device,
            gpu_fraction=gpu_fraction,
            torch_threads=threads,
            kv_cache_bytes=None if is_measured else kv_cache_bytes,
            tensor_parallel_size=config.ranks_of(role),
            attention_dp_size=config.dp_size_of(role),
            staging_pairs=count - 1,
        )
        for role, name in config.instances
    )


def kv_cache_fraction(config: ServeConfig) -> float:
    """The configured share, else the default."""
    given = config.kv_cache_fraction
    return GPU_CACHE_FRACTION if given is None else given


def _check_fraction(config: ServeConfig, device: str) -> None:
    if device == "cpu" and config.kv_cache_fraction is not None:
        raise ConfigError(
            "kv_cache_fraction: expected instances on GPUs, whose memory workers measure, got "
            "cpu; give kv_cache_bytes"
        )


def _ranks(config: ServeConfig) -> int:
    """Processes of all instances."""
    return sum(config.ranks_of(role) for role, _ in config.instances)


def _check_fit(config: ServeConfig, machine: Machine, device: str, kv_cache_bytes: int) -> None:
    """Raises ConfigError when the caches alone, without the weights, are more than there is."""
    count = _ranks(config)
    if device == "cuda":
        per_gpu = -(-count // len(machine.gpus))
        free = min(gpu.free_bytes for gpu in machine.gpus)
        if kv_cache_bytes * per_gpu > free:
            raise ConfigError(
                f"kv_cache_bytes: expected what fits in a GPU's free memory of "
                f"{format_bytes(free)}, got {per_gpu} times {format_bytes(kv_cache_bytes)}; give "
                "less"
            )
        kv_cache_bytes = 0
    if (kv_cache_bytes + config.host_cache_bytes) * count > machine.available_bytes:
        given = [
            (name, format_bytes(size))
            for name, size in (
                ("kv_cache_bytes", kv_cache_bytes),
                ("host_cache_bytes", config.host_cache_bytes),
            )
            if size
        ]
        raise ConfigError(
            f"{' and '.join(name for name, _ in given)}: expected what fits in the free memory of "
            f"{format_bytes(machine.available_bytes)}, got {count} times "
            f"{' and '.join(size for _, size in given)}; give less"
        )


def plan_remote_instances(config: ServeConfig) -> tuple[InstancePlan, ...]:
    """The same for a Ray cluster, whose machines can't be looked at from here. Raises
    ConfigError."""
    missing = [
        key
        for key, known in (
            ("device", config.device != "auto"),
            ("kv_cache_bytes", config.kv_cache_bytes is not None or config.device == "cuda"),
            ("torch_threads", config.torch_threads is not None),
        )
        if not known
    ]
    if missing or config.torch_threads is None:
        raise ConfigError(
            f"with ray_address, expected a value for {', '.join(missing)}: "
            "what the machines of the cluster have can't be seen from here"
        )
    _check_fraction(config, config.device)
    return tuple(
        InstancePlan(
            name=name,
            role=role,
            device=config.device,
            gpu_fraction=1.0 if config.device == "cuda" else 0.0,
            torch_threads=config.torch_threads,
            kv_cache_bytes=config.kv_cache_bytes,
            tensor_parallel_size=config.ranks_of(role),
            attention_dp_size=config.dp_size_of(role),
            staging_pairs=_ranks(config) - 1,
        )
        for role, name in config.instances
    )


def _device(config: ServeConfig, machine: Machine) -> str:
    if config.device == "cuda" and not machine.gpus:
        raise ConfigError(
            "device: expected a CUDA device that torch can use, got none; "
            "use --device cpu, or install a driver and a CUDA build of torch"
        )
    if config.device == "auto":
        return "cuda" if machine.gpus else "cpu"
    return config.device


def estimate_weights_bytes(model: Path, *, bytes_per_parameter: int = 2) -> int:
    """Upper guess of a model's size once loaded, from its files. GGUF weights are unpacked when
    loaded."""
    if model.is_file():
        # The smallest quantisation in use is about four bits a parameter.
        return model.stat().st_size * 2 * bytes_per_parameter
    files = [*model.glob("*.safetensors"), *model.glob("*.bin")]
    return sum(file.stat().st_size for file in files) * bytes_per_parameter // 2


def read_machine(*, gpus: Sequence[Gpu] = ()) -> Machine:
    """Cores and memory that this process may use."""
    return Machine(cores=usable_cores(), available_bytes=available_memory_bytes(), gpus=tuple(gpus))


def usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, within the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) << 10
    return min([available, *_cgroup_room_bytes()])


def _cgroup_room_bytes() -> list[int]:
    """Room under the memory limit of this container, if there is one (cgroup 2, then 1)."""
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text()
        except OSError:
            continue
        return [] if limit == "max" else [max(0, int(limit) - int(usage))]
    return []


def gpu_driver_present() -> bool:
    """Whether this machine has an NVIDIA driver at all. Cheap."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def probe_gpus() -> tuple[Gpu, ...]:
    """GPUs that torch can use here. Takes seconds where there is a driver, nothing where there is
    none."""
    if not gpu_driver_present():
        return ()
    command = [sys.executable, "-P", "-m", "worker.device_probe"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=GPU_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=child_environment({}),
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"asking torch for GPUs took longer than {GPU_PROBE_TIMEOUT_S:.0f} s; "
            "check the driver with nvidia-smi, or use --device cpu"
        ) from error
    if result.returncode != 0:
        raise StartError(
            f"torch could not be asked for GPUs: {result.stderr.strip().splitlines()[-1:]}; "
            "check the driver with nvidia-smi, or use --device cpu"
        )
    found = json.loads(result.stdout.splitlines()[-1])
    return tuple(Gpu(name=str(gpu["name"]), free_bytes=int(gpu["free_bytes"])) for gpu in found)
