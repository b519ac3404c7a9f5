"""The paged runner on the small real model: text in, the same logits as transformers' own
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.devices import usable
from tests.worker.model.harness import PagedModel
from worker.config import ElementType
from worker.model.loader import load_model
from worker.model.source import locate

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea, there lived a baker who had never eaten bread. "
    * 6,
)


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(**locate(real_model).arguments())


def own_error(path: Path, tokens: list[int], exact: torch.Tensor) -> float:
    """Largest difference of transformers' own bfloat16 forward from float32, on the GPU."""
    module: Any = load_model(path, device="cuda", dtype="bfloat16").module
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = module(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].cpu()
    return float((logits[-len(exact) :].float() - exact).abs().max())


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_greedy_decoding_equals_the_reference(
    real_model: Path,
    tokenizer: Any,
    reference: Callable[[Path], Any],
    device: str,
    dtype: ElementType,
) -> None:
    """Three prompts at once, chunks of 50 tokens, 12 decoded tokens: logits within 2e-3 in float32,
    and in bfloat16 about as near as transformers' own bfloat16 forward.
    """
    paged = PagedModel(
        real_model, tokens_per_block=16, slots=64, device=usable(device), dtype=dtype
    )
    oracle = reference(real_model)
    prompts = {f"p{i}": tokenizer(text)["input_ids"] for i, text in enumerate(PROMPTS)}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    pending = {name: list(ids) for name, ids in prompts.items()}
    for _ in range(24):
        pieces = {name: ids[:50] for name, ids in pending.items()}
        for name, row in zip(pieces, paged.feed(**pieces), strict=True):
            pending[name] = pending[name][50:]
            if not pending[name]:
                rows[name].append(row)
                pending[name] = [int(row.argmax())]
    for name, prompt in prompts.items():
        assert len(rows[name]) >= 12
        with torch.inference_mode():
            logits = oracle(torch.tensor([paged.tokens[name]])).logits[0, len(prompt) - 1 :]
        found = torch.stack(rows[name])
        largest = float((found - logits).abs().max())
        if dtype == "float32":
            assert largest <= 2e-3
        else:
            own = own_error(real_model, paged.tokens[name], logits)
            print(f"{dtype}: largest difference {largest:.2f}, transformers' own {own:.2f}")
            assert largest <= 1.5 * own
    assert tokenizer.decode(paged.tokens["p0"]).startswith("The capital of France is Paris")
