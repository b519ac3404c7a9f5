"""B20, B21, B29, B30, B44 on every attention path: keys and values of exactly the step's tokens,
all cached ones beside them, any scale, and no workspace that is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.support.devices import DEVICES, usable
from tests.worker.model.harness import PagedModel
from worker.model.attention import AttentionStep, Scratch, paged_attention
from worker.model.backend import BackendMaker, TorchBackend, triton_backend
from worker.model.errors import AttentionInputError

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
TinyModel = Callable[[str], Path]
BACKENDS = {"torch": TorchBackend, "triton": triton_backend}


class Rows:
    """Random rows of one layer: query ``[1, heads, n, dim]`` and keys and values alike."""

    def __init__(self, count: int, device: str = "cpu", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query, self.key, self.value = (
            torch.randn(1, heads, count, DIM, generator=generator).to(device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )


def attend(
    step: AttentionStep, rows: Rows, *, scaling: float = 1.0, layer: int = 0
) -> torch.Tensor:
    """``[n, heads, dim]``, as a module of transformers asks for it."""
    module: Any = SimpleNamespace(layer_idx=layer)
    found, _ = paged_attention(
        module, rows.query, rows.key, rows.value, None, paged=step, scaling=scaling
    )
    return found[0]


def paged_model(tiny_model: TinyModel, backend: BackendMaker, device: str = "cpu") -> PagedModel:
    return PagedModel(tiny_model("qwen2"), backend=backend, device=device, tokens_per_block=BLOCK)


def begin(paged: PagedModel, **pieces: int) -> AttentionStep:
    """A step with so many new tokens of each sequence."""
    batch = [paged.slice(name, [0] * count) for name, count in pieces.items()]
    return paged.runner._backend.begin(batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pieces", [{"a": 5}, {"a": 1, "b": 1, "c": 1}], ids=["prefill", "decode"])
def test_b44_a_row_too_few_is_refused(
    tiny_model: TinyModel, backend: str, pieces: dict[str, int]
) -> None:
    """A key short, a value short, both, and a query; over cached tokens and without any."""
    paged = paged_model(tiny_model, BACKENDS[backend])
    for _ in range(2):
        step = begin(paged, **pieces)
        for short, message in (
            (("key",), "key and value rows for the same tokens"),
            (("value",), "key and value rows for the same tokens"),
            (("key", "value"), "key and value rows for every token"),
            (("query",), "expected query"),
        ):
            rows = Rows(sum(pieces.values()))
            for name in short:
                setattr(rows, name, getattr(rows, name)[:, :, :-1])
            with pytest.raises(AttentionInputError, match=message):
                attend(step, rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_b29_b30_a_chunk_sees_every_cached_row_at_a_scale_that_is_no_power_of_two(
    tiny_model: TinyModel, backend: str, device: str
) -> None:
    """Two chunks; each row against all keys up to its own, by the definition."""
    paged = paged_model(tiny_model, BACKENDS[backend], usable(device))
    chunks = [Rows(count, device, seed) for seed, count in enumerate((9, 3))]
    found = [attend(begin(paged, a=rows.key.shape[2]), rows, scaling=1.5) for rows in chunks]
    query, key, value = (
        torch.cat([getattr(rows, name) for rows in chunks], 2)[0].double()
        for name in ("query", "key", "value")
    )
    group = HEADS // KV_HEADS
    scores = query @ key.repeat_interleave(group, 0).mT * 1.5
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = (weights @ value.repeat_interleave(group, 0)).transpose(0, 1).float()
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b20_rows_elsewhere_or_of_another_type_are_refused(
    tiny_model: TinyModel, backend: str
) -> None:
    step = begin(paged_model(tiny_model, BACKENDS[backend]), a=5)
    for names in (("query",), ("key", "value")):
        for change, message in ((torch.Tensor.half, "float16"), (to_meta, "on meta")):
            rows = Rows(5)
            for name in names:
                setattr(rows, name, change(getattr(rows, name)))
            with pytest.raises(AttentionInputError, match=message):
                attend(step, rows)


def to_meta(rows: torch.Tensor) -> torch.Tensor:
    """The same on another device."""
    return rows.to("meta")


class CountedScratch(Scratch):
    """Notes how many elements were asked for."""

    taken: list[int]

    @override
    def take(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.taken.append(prod(arguments[0]))
        return super().take(*arguments, **named)


def counted(step: Any) -> tuple[AttentionStep, list[int]]:
    """The step with a scratch that counts."""
    scratch = CountedScratch(torch.empty(0))
    scratch.taken = []
    return replace(step, scratch=scratch), scratch.taken


def test_b21_gathered_pages_are_those_that_a_step_reads(tiny_model: TinyModel) -> None:
    """A first chunk gathers none, later ones what they see: a window's worth at any length."""
    paged = paged_model(tiny_model, TorchBackend)
    block = 2 * KV_HEADS * BLOCK * DIM
    step, taken = counted(begin(paged, a=40))
    attend(step, Rows(40))
    assert taken == []
    step, taken = counted(begin(paged, a=1))
    attend(step, Rows(1))
    attend(step, Rows(1), layer=1)
    # All blocks, and those within the 24 tokens of a window.
    assert taken == [6 * block, 4 * block]


def test_b21_kernels_have_no_workspace_of_the_contexts_length(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are read where they lie: a prefill makes its output and nothing else."""
    paged = paged_model(tiny_model, triton_backend)
    for group in paged.plan.pool_groups:
        paged.storage.pool_bytes(group.id, 0).zero_()
    begin(paged, a=70)
    step, rows = begin(paged, a=7), Rows(7)
    plain, made = torch.empty, list[int]()

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        found = plain(*size, **options)
        made.append(found.numel())
        return found

    monkeypatch.setattr(torch, "empty", noted)
    key_value = torch.stack((rows.key[0], rows.value[0])).permute(2, 0, 1, 3)
    step.attend_stored(0, rows.query[0].transpose(0, 1), key_value, 0.25)
    assert made == [7 * HEADS * DIM]
