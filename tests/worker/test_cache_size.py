"""Rows S2, S11, B24, B34: what a device has free becomes a cache, and torch leaves others some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvcache_core.sizing import SizingDemand
from tests.kvcache_core.support import LAYOUTS, plan_of
from tests.support.devices import usable
from tests.support.rank_threads import on_ranks
from transfer.identity import Incarnation
from transfer.staging_buffers import device_staging_bytes
from worker.cache_size import least_of_all
from worker.config import WorkerConfig
from worker.core import RankCore, load_core, warm_up
from worker.device_memory import DeviceMemory, device_memory
from worker.largest_batch import BatchLimits, largest_batch
from worker.memory_budget import (
    MARGIN_BYTES,
    MemoryNeeds,
    MemoryReading,
    cache_quota,
    default_margin,
    torch_cap,
)
from worker.model.rank_sum import RankSum
from worker.model.runner import ModelRunner, SequenceSlice

GIB = 1 << 30
sizes = st.integers(0, 200 * GIB)
needs_of = st.builds(MemoryNeeds, step_bytes=sizes, staging_bytes=sizes)
MARGIN = """
from worker.runtime_hooks import RuntimeHooks
HOOKS = RuntimeHooks(torch_mem_safety_margin={})
"""


@settings(max_examples=40)
@given(free=sizes, needs=needs_of, fraction=st.floats(0.01, 1))
def test_the_cache_leaves_what_is_needed_beside_it(
    free: int, needs: MemoryNeeds, fraction: float
) -> None:
    quota = cache_quota(free, needs, fraction)
    assert 0 <= quota <= max(0, free - needs.bytes)
    assert cache_quota(free + GIB, needs, fraction) >= quota
    assert cache_quota(free, needs, fraction / 2) <= quota


@settings(max_examples=40)
@given(free=sizes, needs=needs_of)
def test_b24_the_default_margin_stays_below_what_is_free(free: int, needs: MemoryNeeds) -> None:
    margin = default_margin(free, needs)
    assert 0 <= margin <= MARGIN_BYTES
    assert margin < free or free == margin == 0
    # What is known to be needed is not taken from torch.
    assert free - margin >= min(free, needs.bytes)


@pytest.mark.parametrize(
    ("free", "margin"),
    [
        (0, 0),
        (1, 0),
        (2, 1),
        (GIB // 2, GIB // 4),
        (GIB, GIB // 2),
        (3 * GIB, GIB),
        (80 * GIB, GIB),
    ],
)
def test_b24_at_the_boundary(free: int, margin: int) -> None:
    assert default_margin(free, MemoryNeeds()) == margin


@settings(max_examples=40)
@given(free=sizes, reserved=sizes, needs=needs_of, declared=st.none() | sizes)
def test_s2_the_cap_of_torch_is_what_it_has_and_what_is_free_less_the_margin(
    free: int, reserved: int, needs: MemoryNeeds, declared: int | None
) -> None:
    reading = MemoryReading(total_bytes=400 * GIB, free_bytes=free, reserved_bytes=reserved)
    if declared is not None and declared >= free:
        with pytest.raises(ValueError, match=f"less than the {free} bytes .* got {declared}"):
            torch_cap(reading, needs, declared)
        return
    margin = default_margin(free, needs) if declared is None else declared
    cap = torch_cap(reading, needs, declared)
    assert cap == reserved + free - margin
    assert cap > reserved or free == 0


@settings(max_examples=40)
@given(tokens=st.integers(1, 600), running=st.integers(1, 80), longest=st.integers(1, 600))
def test_the_largest_step_has_all_that_a_step_may_have(
    tokens: int, running: int, longest: int
) -> None:
    lengths = BatchLimits(
        max_batch_tokens=tokens, max_running=running, max_sequence_tokens=longest
    ).largest()
    assert sum(lengths) == min(tokens, running * longest)
    assert len(lengths) == min(tokens, running)
    assert all(1 <= length <= longest for length in lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b34_the_largest_step_fits_the_least_pools_of_any_layout(layout: str) -> None:
    plan = plan_of(layout)
    slots = plan.floor_slots()
    limits = BatchLimits(max_batch_tokens=9, max_running=3, max_sequence_tokens=21)
    for piece in largest_batch(plan, slots, limits):
        assert piece.start + len(piece.tokens) == 21
        assert len(piece.block_tables) == len(plan.layer_groups)
        for table, group in zip(piece.block_tables, plan.layer_groups, strict=True):
            assert len(table) == 6
            assert 0 <= table.min() <= table.max() < slots[group.pool_group]


class ScriptedMemory(DeviceMemory):
    """A device that says what it is told to, and remembers what it was asked."""

    def __init__(self, free: int = 20_000_000, step: int = 2_000_000) -> None:
        self.free = free
        self.step = step
        self.asked: list[str] = []
        self.cap = 0

    @override
    def reading(self) -> MemoryReading:
        self.asked.append("reading")
        return MemoryReading(
            total_bytes=100_000_000, free_bytes=self.free, reserved_bytes=1_000_000
        )

    @override
    def watch(self) -> None:
        self.asked.append("watch")

    @override
    def peak_bytes(self) -> int:
        self.asked.append("peak")
        return self.step

    @override
    def limit_torch(self, cap_bytes: int) -> None:
        self.asked.append("limit")
        self.cap = cap_bytes


@pytest.fixture
def loaded(tiny_model: Callable[[str], Path]) -> Callable[..., RankCore]:
    """Load a tiny model, over the given memory and with the given sum of ranks."""

    def load(
        memory: DeviceMemory | None, ranks: RankSum | None = None, **fields: object
    ) -> RankCore:
        config = WorkerConfig.model_validate(
            {
                "incarnation": Incarnation.mint("a"),
                "role": "aggregated",
                "model_path": str(tiny_model("qwen2")),
                "model_name": "tiny",
                "cluster_token": "test token",
                "kv_cache_bytes": None,
                "tokens_per_block": 8,
                "max_batch_tokens": 48,
                "max_running": 6,
                **fields,
            }
        )
        met: Any = None if ranks is None else SimpleNamespace(join=lambda device, host: ranks)
        return load_core(config, met, lambda line: None, lambda device: memory)

    return load


@pytest.fixture
def noted_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedMemory], None]:
    """Note steps in what a scripted device was asked."""

    def note(memory: ScriptedMemory) -> None:
        plain = ModelRunner.forward

        def noted(runner: ModelRunner, batch: Sequence[SequenceSlice]) -> torch.Tensor:
            memory.asked.append(f"step of {len(batch)}")
            return plain(runner, batch)

        monkeypatch.setattr(ModelRunner, "forward", noted)

    return note


def test_a_measured_cache_takes_its_share_of_what_a_step_leaves(
    loaded: Callable[..., RankCore], noted_steps: Callable[[ScriptedMemory], None]
) -> None:
    memory = ScriptedMemory()
    noted_steps(memory)
    core = loaded(memory, staging_pairs=2, kv_cache_fraction=0.5)
    assert memory.asked == ["reading", "watch", "step of 6", "peak", "reading", "reading", "limit"]
    staging = device_staging_bytes(100_000_000, 2)
    quota = int((20_000_000 - 2_000_000 - staging) * 0.5)
    plan = core.plan
    pools = plan.pool_bytes(core.storage.slots)
    assert pools <= quota < pools + 2 * sum(group.bytes_per_slot for group in plan.pool_groups)
    needs = MemoryNeeds(step_bytes=2_000_000, staging_bytes=staging)
    assert memory.cap == 21_000_000 - default_margin(20_000_000, needs)
    warm_up(core)


def test_the_cache_does_not_depend_on_the_margin(
    loaded: Callable[..., RankCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "margin_for_a_test.py").write_text(MARGIN.format(5_000_000))
    (tmp_path / "no_margin_for_a_test.py").write_text(MARGIN.format(20_000_000))
    plain, declared = ScriptedMemory(), ScriptedMemory()
    first = loaded(plain)
    second = loaded(declared, runtime_hooks="margin_for_a_test:HOOKS")
    assert first.storage.slots == second.storage.slots
    assert declared.cap == 16_000_000 != plain.cap
    with pytest.raises(
        ValueError, match="torch_mem_safety_margin: expected less than the 20000000"
    ):
        loaded(ScriptedMemory(), runtime_hooks="no_margin_for_a_test:HOOKS")


def test_a_configured_size_is_taken_and_no_step_is_run(
    loaded: Callable[..., RankCore], noted_steps: Callable[[ScriptedMemory], None]
) -> None:
    memory = ScriptedMemory()
    noted_steps(memory)
    core = loaded(memory, kv_cache_bytes=3_000_000)
    assert memory.asked == ["reading", "reading", "limit"]
    demand = SizingDemand(chunk_tokens=48, typical_sequence_tokens=512)
    assert core.storage.slots == core.plan.slots_for(3_000_000, demand)


def test_too_little_memory_is_said_with_every_number(loaded: Callable[..., RankCore]) -> None:
    with pytest.raises(ValueError, match=r"got 0: 0\.9 of 20000000 .* 30000000 of a step and 0 of"):
        loaded(ScriptedMemory(step=30_000_000))
    with pytest.raises(ValueError, match=r"bytes for the least KV cache .* got 10000; free some"):
        loaded(ScriptedMemory(free=10_000))
    with pytest.raises(ValueError, match="kv_cache_bytes: expected a size on cpu"):
        loaded(None)


def test_ranks_take_the_least_of_what_they_measured() -> None:
    def least(ranks: RankSum) -> int:
        return least_of_all(ranks, (70 << 32) - ranks.shard.rank, torch.device("cpu"))

    assert on_ranks(3, least) == [(70 << 32) - 2] * 3


def test_ranks_that_measure_at_once_size_by_the_least(loaded: Callable[..., RankCore]) -> None:
    def pools(ranks: RankSum) -> tuple[tuple[int, ...], int]:
        memory = ScriptedMemory(free=20_000_000 - 8_000_000 * ranks.shard.rank)
        core = loaded(memory, ranks, tensor_parallel_size=2, rank=ranks.shard.rank)
        return core.storage.slots, core.plan.pool_bytes(core.storage.slots)

    first, second = on_ranks(2, pools)
    assert first == second
    assert 8_990_000 < first[1] <= 9_000_000


@pytest.mark.gpu
def test_a_gpu_is_measured_and_torch_is_limited(loaded: Callable[..., RankCore]) -> None:
    device = torch.device(usable("cuda"), torch.cuda.current_device())
    memory = device_memory(device)
    assert memory is not None
    free = memory.reading().free_bytes
    core = loaded(memory, device="cuda", kv_cache_fraction=0.3)
    try:
        pools = core.plan.pool_bytes(core.storage.slots)
        assert 0.2 * free < pools < 0.3 * free
        warm_up(core)
        after = memory.reading().free_bytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(after - MARGIN_BYTES // 2, dtype=torch.uint8, device=device)
        torch.empty(after - 2 * MARGIN_BYTES, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
