"""RMSNorm of many rows against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from worker.model.errors import AttentionInputError

row_norms: Any = pytest.importorskip("worker.model.kernels.row_norm", exc_type=ModuleNotFoundError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
if DEVICE == "cuda":
    LIMITS[torch.bfloat16] = 2e-2


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@pytest.mark.parametrize("width", [1, 72, 1024, 3584])
def test_rows_are_normed(dtype: torch.dtype, num_rows: int, width: int) -> None:
    random = torch.Generator().manual_seed(width + num_rows)
    rows = (3.0 * torch.randn(num_rows, width, generator=random)).to(DEVICE, dtype)
    weight = torch.randn(width, generator=random).to(DEVICE, dtype)
    expected = rms_norm(rows.float(), (width,), weight.float(), 0.1).to(dtype)
    before = rows.clone()
    found = row_norms.row_norm(rows, weight, 0.1)
    torch.testing.assert_close(found, expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])
    assert torch.equal(rows, before)


def test_large_float16_rows_stay_finite() -> None:
    """Their squares are beyond float16."""
    rows = torch.full((2, 64), 6e4, dtype=torch.float16, device=DEVICE)
    found = row_norms.row_norm(rows, torch.ones_like(rows[0]), 1e-5)
    torch.testing.assert_close(found, torch.ones_like(rows))


def test_a_tiny_row_does_not_divide_by_nothing() -> None:
    rows = torch.zeros(1, 16, device=DEVICE)
    assert torch.equal(row_norms.row_norm(rows, torch.ones_like(rows[0]), 1e-5), rows)


@pytest.mark.parametrize("wrong", ["transposed rows", "short weight", "too wide", "strided weight"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    rows, weight = torch.zeros(4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    match wrong:
        case "transposed rows":
            rows = torch.zeros(8, 4, device=DEVICE).t()
        case "short weight":
            weight = weight[:7]
        case "too wide":
            rows = torch.zeros(1, row_norms.WIDEST + 1, device=DEVICE)
            weight = torch.ones(row_norms.WIDEST + 1, device=DEVICE)
        case _:
            weight = torch.ones(16, device=DEVICE)[::2]
    with pytest.raises(AttentionInputError, match="expected"):
        row_norms.row_norm(rows, weight, 1e-5)
