"""The whole model over the ``triton`` backend gives what the reference backend gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.devices import usable
from tests.worker.model.harness import PagedModel
from worker.config import KVElementType
from worker.model.backend import PagedLayers, TorchBackend, backend_of, triton_backend
from worker.model.loader import load_model
from worker.model.prefill_choice import AttentionShape, PrefillRates, pairs, torch_is_faster
from worker.model.step import SequenceSlice
from worker.model.triton_backend import TritonBackend, TritonStep

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 60)]


def test_a_model_over_both_backends(tiny_model: Callable[[str], Path]) -> None:
    """Layers with and without windows."""
    path = tiny_model("gemma3_text")
    reference = PagedModel(path, backend=TorchBackend)
    paged = PagedModel(path, backend=triton_backend, seed=1)
    for pieces in (
        {"a": TOKENS[:30], "b": TOKENS[:3]},
        {"a": TOKENS[30:45], "b": TOKENS[3:4], "c": TOKENS[:1]},
        {"a": TOKENS[45:46], "b": TOKENS[4:5], "c": TOKENS[1:2]},
    ):
        torch.testing.assert_close(
            paged.feed(**pieces), reference.feed(**pieces), atol=2e-4, rtol=0
        )


@pytest.mark.gpu
def test_b38_steps_described_on_a_late_device_keep_their_own_values(
    tiny_model: Callable[[str], Path],
) -> None:
    """Pinned memory of a step must not be another step's before it was read."""
    paged = PagedModel(tiny_model("llama"), backend=triton_backend, device=usable("cuda"))
    backend = paged.runner._backend
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    steps = [backend.begin([paged.slice("a", [token])]) for token in TOKENS[:20]]
    for position, step in enumerate(steps):
        assert isinstance(step, TritonStep)
        assert step.metadata.starts.tolist() == [position]


@pytest.mark.parametrize(("family", "kv_dtype"), [("llama", "auto"), ("qwen2", "fp8")])
def test_prefills_in_torchs_attention(
    tiny_model: Callable[[str], Path], family: str, kv_dtype: KVElementType
) -> None:
    """Where that is faster; decodes of the step, and layers with windows, stay in the kernels."""
    path = tiny_model(family)
    used: list[int] = []

    class Watched(TritonBackend):
        @override
        def begin(self, pieces: Sequence[SequenceSlice]) -> TritonStep:
            step = super().begin(pieces)
            if step.gathered is not None:
                used.extend(i for i in range(3) if step.gathered.takes(i, 6))
            return step

    def gathering(layers: PagedLayers) -> TritonBackend:
        return Watched(layers, replace(SLOW_KERNEL, gather_bytes=1e18, call_s=0.0))

    reference = PagedModel(path, backend=TorchBackend, kv_dtype=kv_dtype)
    paged = PagedModel(path, backend=gathering, seed=1, kv_dtype=kv_dtype)
    for pieces in ({"a": TOKENS[:9], "b": TOKENS[:3]}, {"a": TOKENS[9:17], "b": TOKENS[3:4]}):
        torch.testing.assert_close(
            paged.feed(**pieces), reference.feed(**pieces), atol=2e-4, rtol=0
        )
    assert used == ([0, 1, 2] * 2 if family == "llama" else [0] * 2)


SLOW_KERNEL = PrefillRates(kernel_flops=3e14, torch_flops=6e14, gather_bytes=1.5e12, call_s=2e-5)
LLAMA = AttentionShape(heads=32, kv_heads=8, head_dim=128, element_bytes=2)


def test_the_choice_follows_from_the_rates() -> None:
    def torchs(*chunks: tuple[int, int]) -> bool:
        return torch_is_faster(chunks, LLAMA, SLOW_KERNEL)

    assert not torch_is_faster([(0, 8192)], LLAMA, None)
    assert not torchs()
    assert torchs((0, 8192))
    assert torchs((6144, 2048))
    assert not torchs((0, 64))
    assert not torchs((32768, 16))  # gathering costs more than the products
    assert not torchs(*[(0, 64)] * 100)
    assert pairs((0, 3)) == 6
    assert pairs((5, 2)) == 6 + 7


@given(st.integers(0, 1 << 16), st.integers(2, 1 << 14))
def test_more_queries_over_the_same_keys_favour_torch(start: int, count: int) -> None:
    chunk, longer = (start, count), (start, 2 * count)
    if torch_is_faster([chunk], LLAMA, SLOW_KERNEL):
        assert torch_is_faster([longer], LLAMA, SLOW_KERNEL)
        assert torch_is_faster([chunk, longer], LLAMA, SLOW_KERNEL)


def test_the_device_chooses(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_model("llama"))
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)

    def chosen(device: str) -> str:
        storage = TorchStorage(plan, [2] * len(plan.pool_groups), device)
        return type(backend_of(PagedLayers(plan, storage, loaded.specs, loaded.dtype))).__name__

    assert chosen("cpu") == TorchBackend.__name__
    if torch.cuda.is_available():
        assert chosen("cuda") == TritonBackend.__name__
