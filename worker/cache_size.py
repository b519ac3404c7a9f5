"""How many bytes the KV cache of a rank gets: as configured, or measured where a device says what
it has free. All ranks of an instance get the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing import SizingDemand
from kvcache_core.storage import TorchStorage
from transfer.staging_buffers import device_staging_bytes
from worker.config import WorkerConfig
from worker.device_memory import DeviceMemory
from worker.executor import ModelExecutor
from worker.largest_batch import BatchLimits, largest_batch
from worker.memory_budget import MemoryNeeds, cache_quota, torch_cap
from worker.model.rank_sum import RankSum
from worker.runtime_hooks import ManagerClass


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Bytes of the KV cache, and what is needed beside it."""

    quota_bytes: int
    needs: MemoryNeeds


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Candidate:
    """A model that is about to get its pages."""

    plan: LayoutPlan
    manager: ManagerClass
    demand: SizingDemand
    ranks: RankSum
    device: torch.device
    max_sequence_tokens: int
    executor_over: Callable[[TorchStorage], ModelExecutor]
    """The model over some pages."""


def size_cache(
    config: WorkerConfig,
    candidate: Candidate,
    memory: DeviceMemory | None,
    progress: Callable[[str], None],
) -> CacheSize:
    """Size the cache; with ``kv_cache_bytes`` None run the largest step once, to see what it takes.

    Raises:
        ValueError: nothing says how large, or there is no room for the least pools.
    """
    if memory is None:
        if config.kv_cache_bytes is None:
            raise ValueError(
                f"kv_cache_bytes: expected a size on {candidate.device}, whose memory is not "
                "measured, got none"
            )
        return CacheSize(quota_bytes=config.kv_cache_bytes, needs=MemoryNeeds())
    before = memory.reading()
    staging = device_staging_bytes(before.total_bytes, config.staging_pairs)
    if config.kv_cache_bytes is not None:
        return CacheSize(
            quota_bytes=config.kv_cache_bytes, needs=MemoryNeeds(staging_bytes=staging)
        )
    progress(f"measuring a step of {config.max_batch_tokens} tokens")
    step = _step_bytes(config, candidate, memory, before.free_bytes)
    # What libraries and the driver took for themselves meanwhile is not free any more.
    after = memory.reading()
    progress(
        f"the step takes {step / 1e6:.0f} MB, transfers up to {staging / 1e6:.0f} MB, "
        f"{after.free_bytes / 1e6:.0f} MB are free"
    )
    needs = MemoryNeeds(step_bytes=step, staging_bytes=staging)
    quota = cache_quota(after.free_bytes, needs, config.kv_cache_fraction)
    least = candidate.plan.pool_bytes(
        candidate.manager.floor_slots(candidate.plan, candidate.demand)
    )
    quota = least_of_all(candidate.ranks, quota, candidate.device)
    if quota < least:
        raise ValueError(
            f"kv_cache_fraction: expected {least} bytes at least for a KV cache, got {quota}: "
            f"{config.kv_cache_fraction} of {after.free_bytes} free bytes less {step} of a step "
            f"and {staging} of transfers; free some memory or lower max_batch_tokens"
        )
    return CacheSize(quota_bytes=quota, needs=needs)


def _step_bytes(
    config: WorkerConfig, candidate: Candidate, memory: DeviceMemory, free_bytes: int
) -> int:
    """What the largest step takes beside weights and pages, seen once over the least pools."""
    plan = candidate.plan
    slots = candidate.manager.floor_slots(plan, candidate.demand)
    if plan.pool_bytes(slots) > free_bytes:
        raise ValueError(
            f"expected {plan.pool_bytes(slots)} free bytes for the least KV cache beside the "
            f"weights, got {free_bytes}; free some memory or lower max_batch_tokens"
        )
    executor = candidate.executor_over(TorchStorage(plan, slots, candidate.device))
    limits = BatchLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_sequence_tokens=candidate.max_sequence_tokens,
    )
    memory.watch()
    executor.execute(largest_batch(plan, slots, limits))
    return memory.peak_bytes()


def least_of_all(ranks: RankSum, value: int, device: torch.device) -> int:
    """The least of all ranks' values. All ranks call it at once."""
    shard = ranks.shard
    values = torch.zeros(shard.size, dtype=torch.int64, device=device)
    values[shard.rank] = value
    return int(ranks.add_up(values).min())


def limit_torch(memory: DeviceMemory, needs: MemoryNeeds, margin_bytes: int | None) -> None:
    """Once the pools are there: keep torch from taking what others need.

    Raises:
        ValueError: the declared margin is not below what is free.
    """
    memory.limit_torch(torch_cap(memory.reading(), needs, margin_bytes))
