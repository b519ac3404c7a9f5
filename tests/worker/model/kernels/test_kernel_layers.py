"""Models with biases and windows, or norms of heads, by kernels against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from worker.model.loader import load_model
from worker.model.networks import FusedModel
from worker.model.products import RowNorm
from worker.model.runner import ModelRunner, SequenceSlice

kernel_layers: Any = pytest.importorskip("worker.model.kernel_layers", exc_type=ModuleNotFoundError)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits(
    tiny_model: Callable[[str], Path], reference: Callable[[Path], Any], family: str
) -> None:
    loaded = load_model(tiny_model(family), device=DEVICE, dtype="float32")
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)
    storage = TorchStorage(plan, [16] * len(plan.pool_groups), loaded.device)
    network = FusedModel(loaded, kernel_layers.KERNEL_PARTS)
    runner = ModelRunner(loaded, plan, storage, network)
    tokens = np.random.default_rng(3).integers(0, 256, 36).astype(np.int32)
    tables = tuple(np.arange(6, dtype=np.int32) + 6 * i for i in range(len(plan.layer_groups)))
    with torch.inference_mode():
        expected = reference(tiny_model(family))(torch.from_numpy(tokens)[None].long()).logits[0]
    for start, end in ((0, 33), (33, 35), (35, 36)):
        piece = SequenceSlice(tokens[start:end], start, tables, wants_logits=True)
        found = runner.forward([piece])[0].cpu()
        torch.testing.assert_close(found, expected[end - 1], atol=2e-3, rtol=0)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_number_of_rows(num_rows: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(12, 16, generator=random).to(DEVICE, dtype)
    bias = torch.randn(12, generator=random).to(DEVICE, dtype)
    rows = torch.randn(num_rows, 16, generator=random).to(DEVICE, dtype)
    scale = torch.randn(16, generator=random).to(DEVICE, dtype)
    residual = torch.randn(num_rows, 12, generator=random).to(DEVICE, dtype)
    found = kernel_layers.KernelProduct(weight, bias)
    entered = rms_norm(rows, (16,), scale, 1e-3)
    plain, normed = linear(rows, weight, bias), linear(entered, weight, bias)
    norm = RowNorm(scale, 1e-3)
    limit = 5e-2 if dtype == torch.float16 else 1e-4

    def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, atol=limit, rtol=limit)

    check(found(rows), plain)
    check(found.added_to(residual.clone(), rows), residual + plain)
    check(found.normed(rows, norm), normed)
    gated = silu(normed[:, :6]) * normed[:, 6:]
    check(found.gated(rows, norm, silu), gated)


def test_large_float16_rows_stay_finite() -> None:
    """Scaled by the norm's weight they would overflow before the norm makes them small."""
    rows = torch.full((2, 16), 3e4, dtype=torch.float16, device=DEVICE)
    norm = RowNorm(torch.full((16,), 8.0, dtype=torch.float16, device=DEVICE), 1e-3)
    weight = torch.eye(16, dtype=torch.float16, device=DEVICE)
    found = kernel_layers.KernelProduct(weight, None).normed(rows, norm)
    torch.testing.assert_close(found, torch.full_like(rows, 8.0))
