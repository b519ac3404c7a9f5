"""The whole model over the ``triton`` backend gives what the reference backend gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.devices import usable
from tests.worker.model.harness import PagedModel
from worker.model.backend import PagedLayers, TorchBackend, backend_of, triton_backend
from worker.model.loader import load_model
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


def test_the_device_chooses(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_model("llama"))
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)

    def chosen(device: str) -> str:
        storage = TorchStorage(plan, [2] * len(plan.pool_groups), device)
        return type(backend_of(PagedLayers(plan, storage, loaded.specs, loaded.dtype))).__name__

    assert chosen("cpu") == TorchBackend.__name__
    if torch.cuda.is_available():
        assert chosen("cuda") == TritonBackend.__name__
