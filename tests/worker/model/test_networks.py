"""Both ways through the network, for every family and dtype, against transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.models import FAMILIES
from worker.config import ElementType
from worker.model.attention import check_rows, paged_attention
from worker.model.errors import AttentionInputError
from worker.model.fused import FUSED_FAMILIES
from worker.model.loader import load_model
from worker.model.networks import FusedModel, Network, PlainModel, network_of
from worker.model.products import DenseProduct, fused
from worker.model.runner import ModelRunner, SequenceSlice

TinyModel = Callable[[str], Path]
WAYS = [
    *[(PlainModel, family) for family in FAMILIES],
    *[(FusedModel, family) for family in sorted(FUSED_FAMILIES)],
]


@pytest.mark.parametrize(("way", "family"), WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 1.2)])
def test_logits(
    tiny_model: TinyModel,
    reference: Callable[[Path], Any],
    way: Callable[[Any], Network],
    family: str,
    dtype: ElementType,
    tolerance: float,
) -> None:
    loaded = load_model(tiny_model(family), dtype=dtype)
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)
    storage = TorchStorage(plan, [16] * len(plan.pool_groups))
    runner = ModelRunner(loaded, plan, storage, way(loaded))
    tokens = np.random.default_rng(3).integers(0, 256, 45).astype(np.int32)
    tables = tuple(np.arange(6, dtype=np.int32) + 6 * i for i in range(len(plan.layer_groups)))
    with torch.inference_mode():
        expected = reference(tiny_model(family))(torch.from_numpy(tokens)[None].long()).logits[0]
    for start, end in ((0, 20), (20, 44), (44, 45)):
        piece = SequenceSlice(tokens[start:end], start, tables, wants_logits=True)
        found = runner.forward([piece])[0]
        torch.testing.assert_close(found, expected[end - 1], atol=tolerance, rtol=0)


def test_the_fastest_way_of_each_family(tiny_model: TinyModel) -> None:
    ways = {family: type(network_of(load_model(tiny_model(family)))) for family in FAMILIES}
    assert ways == {
        family: FusedModel if family in FUSED_FAMILIES else PlainModel for family in FAMILIES
    }


def test_a_dense_product_shares_the_modules_weights() -> None:
    linears = [nn.Linear(8, 4, bias=True, dtype=torch.float16) for _ in range(2)]
    linears.append(nn.Linear(8, 2, bias=False, dtype=torch.float16))
    rows = torch.randn(3, 8, dtype=torch.float16)
    expected = torch.cat([module(rows) for module in linears], 1)
    product = fused(linears)
    assert isinstance(product, DenseProduct)
    torch.testing.assert_close(product(rows), expected)
    torch.testing.assert_close(torch.cat([module(rows) for module in linears], 1), expected)
    residual = torch.randn(3, 10, dtype=torch.float16)
    torch.testing.assert_close(product.added_to(residual.clone(), rows), residual + expected)


@pytest.mark.parametrize("bias", ["bias", "no bias"])
@pytest.mark.parametrize("rows", [1, 2, 8, 100])
def test_a_packed_product(rows: int, bias: str) -> None:
    linears = [nn.Linear(16, size, bias=bias == "bias") for size in (6, 2, 4)]
    for module in linears:
        module.requires_grad_(requires_grad=False)
    values, residual = torch.randn(rows, 16), torch.randn(rows, 12)
    expected = torch.cat([module(values) for module in linears], 1)
    product = fused(linears)
    torch.testing.assert_close(product(values), expected)
    torch.testing.assert_close(product.added_to(residual.clone(), values), residual + expected)
    assert product(values).is_contiguous()


class TestRowsAreChecked:
    """What a network hands to the attention must fit the pages (one row short is refused, too)."""

    @pytest.fixture
    def layer(self, tiny_model: TinyModel) -> Any:
        from worker.model.attention import LayerPages

        plan = LayoutPlan.derive(load_model(tiny_model("llama")).specs, tokens_per_block=8)
        return LayerPages(TorchStorage(plan, [4]).kv(0), 0)

    @pytest.mark.parametrize(
        ("query", "rows", "match"),
        [
            (torch.zeros(5, 6, 16), torch.zeros(4, 2, 2, 16), "key and value rows for every"),
            (torch.zeros(4, 6, 16), torch.zeros(5, 2, 2, 16), r"expected query \[5"),
            (torch.zeros(5, 5, 16), torch.zeros(5, 2, 2, 16), "multiple of 2"),
            (torch.zeros(5, 6, 16), torch.zeros(5, 2, 2, 16).double(), "key and value in"),
            (torch.zeros(5, 6, 16).half(), torch.zeros(5, 2, 2, 16), "query in"),
            (torch.zeros(5, 6, 16, device="meta"), torch.zeros(5, 2, 2, 16), "on cpu for pages in"),
            (torch.zeros(5, 16, 6).mT, torch.zeros(5, 2, 2, 16), "contiguous query"),
        ],
    )
    def test_refused(self, layer: Any, query: torch.Tensor, rows: torch.Tensor, match: str) -> None:
        with pytest.raises(AttentionInputError, match=match):
            check_rows(layer, 5, query, rows)

    def test_a_short_value_or_a_mask(self) -> None:
        query, key = torch.zeros(1, 6, 5, 16), torch.zeros(1, 2, 5, 16)
        nothing: Any = None
        with pytest.raises(AttentionInputError, match="same tokens and heads"):
            paged_attention(nn.Identity(), query, key, key[:, :, :4], None, paged=nothing)
        with pytest.raises(AttentionInputError, match="no attention mask"):
            paged_attention(nn.Identity(), query, key, key, torch.zeros(5, 5), paged=nothing)
