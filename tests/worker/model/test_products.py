"""Products in oneDNN's layout: equal to plain ones, and bounded in what oneDNN keeps of them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.process_facts import ProcessFacts
from worker.model.products import EXACT_ROWS, PackedProduct, RowNorm, can_pack, padded_rows

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


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4], ids=["tiny rows", "rows", "huge rows"])
@torch.inference_mode()
def test_a_norm_is_part_of_the_matrix(weight: torch.Tensor, rows: int, size: float) -> None:
    """Also where rows are so small that the norm's epsilon is all that counts."""
    random = torch.Generator().manual_seed(rows)
    given = size * torch.randn(rows, IN, generator=random)
    bias = torch.randn(OUT, generator=random)
    norm = RowNorm(1.0 + 0.3 * torch.randn(IN, generator=random), 1e-5)
    before = weight.clone()
    product = PackedProduct(weight, bias, norm)
    expected = norm(given) @ weight.T + bias
    torch.testing.assert_close(product.normed(given, norm), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(weight, before)
    with pytest.raises(ValueError, match="normed by this product"):
        product(given)
    with pytest.raises(ValueError, match="another one"):
        product.normed(given, RowNorm(norm.weight, 1e-5))


@pytest.mark.parametrize("rows", [0, 1, 8, EXACT_ROWS + 1, 33])
@torch.inference_mode()
def test_bfloat16_is_packed_with_its_norm_apart(weight: torch.Tensor, rows: int) -> None:
    brain = weight.bfloat16()
    if not can_pack(brain):
        pytest.skip("this CPU has no instructions for bfloat16")
    random = torch.Generator().manual_seed(rows)
    given = torch.randn(rows, IN, generator=random).bfloat16()
    residual = torch.randn(rows, OUT, generator=random).bfloat16()
    norm = RowNorm((1.0 + 0.3 * torch.randn(IN, generator=random)).bfloat16(), 1e-5)
    product = PackedProduct(brain, None, norm)
    plain = given.float() @ brain.float().T
    torch.testing.assert_close(product(given).float(), plain, atol=0.06, rtol=0.008)
    normed = norm(given).float() @ brain.float().T
    torch.testing.assert_close(product.normed(given, norm).float(), normed, atol=0.06, rtol=0.008)
    added = product.added_to(residual.clone(), given).float()
    torch.testing.assert_close(added, residual.float() + plain, atol=0.06, rtol=0.008)


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
