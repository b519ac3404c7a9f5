"""Products in oneDNN's layout: equal to plain ones, and bounded in what oneDNN keeps of them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.process_facts import ProcessFacts
from worker.model.products import EXACT_ROWS, PackedProduct, can_pack, padded_rows

MIB = 1 << 20
OUT, IN = 224, 96


@pytest.fixture
def weight() -> torch.Tensor:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))
    if not can_pack(weight):
        pytest.skip("torch has no oneDNN here")
    return weight


@pytest.mark.parametrize("rows", [1, EXACT_ROWS, EXACT_ROWS + 1, 33, 257])
@torch.inference_mode()
def test_any_number_of_rows_is_right(weight: torch.Tensor, rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    given = torch.randn(rows, IN, generator=random)
    bias, residual = torch.randn(OUT, generator=random), torch.randn(rows, OUT, generator=random)
    product = PackedProduct(weight, bias)
    plain = given @ weight.T + bias
    torch.testing.assert_close(product(given), plain)
    torch.testing.assert_close(product.added_to(residual.clone(), given), residual + plain)


def test_few_numbers_of_rows_and_few_rows_more() -> None:
    found = [padded_rows(count) for count in range(1, 4097)]
    assert found[:EXACT_ROWS] == list(range(1, EXACT_ROWS + 1))
    assert all(count <= more <= 1.125 * count for count, more in enumerate(found, 1))
    assert len(set(found)) == EXACT_ROWS + 8 * 8


@torch.inference_mode()
def test_steps_of_any_number_of_rows_cost_little_memory(weight: torch.Tensor) -> None:
    """A kernel for each number kept 280 MiB of this matrix, and gigabytes of a real model."""
    product = PackedProduct(weight, None)
    given = torch.randn(512, IN)
    product(given)
    before = ProcessFacts.of(os.getpid()).rss_bytes
    for rows in range(65, 513):
        product(given[:rows])
    assert ProcessFacts.of(os.getpid()).rss_bytes - before < 40 * MIB
