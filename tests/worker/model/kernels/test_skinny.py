"""Products of few rows against torch, with everything that can be part of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from tests.support.devices import usable
from worker.model.errors import AttentionInputError

skinny: Any = pytest.importorskip("worker.model.kernels.skinny", exc_type=ModuleNotFoundError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 1e-1  # the interpreter's product of bfloat16 is wrong
TILING = skinny.Tiling(16, 32, 4, 2)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=random).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 17])
@pytest.mark.parametrize("num_in", [64, 72], ids=["whole tiles", "a part of a tile"])
@pytest.mark.parametrize("extras", ["none", "bias", "norm", "residual", "all"])
def test_a_product(dtype: torch.dtype, num_rows: int, num_in: int, extras: str) -> None:
    rows, weight = some(num_rows, num_in, dtype=dtype), some(37, num_in, dtype=dtype, seed=1)
    bias = some(37, dtype=dtype) if extras in ("bias", "all") else None
    scale = some(num_in, dtype=dtype, seed=2) if extras in ("norm", "all") else None
    residual = some(num_rows, 37, dtype=dtype) if extras in ("residual", "all") else None
    entered = rows.float()
    if scale is not None:
        entered = rms_norm(entered, (num_in,), scale.float(), 0.1)
    expected = linear(entered, weight.float(), None if bias is None else bias.float())
    if residual is not None:
        expected = expected + residual.float()
    before = None if residual is None else residual.clone()
    found = skinny.product(
        rows,
        skinny.Matrix(weight, bias),
        norm=None if scale is None else skinny.Norm(scale, 0.1),
        residual=residual,
        tiling=TILING,
    )
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected.to(dtype), atol=limit, rtol=limit)
    if residual is not None and before is not None:
        assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("extras", ["none", "bias", "norm"])
def test_a_gated_product(dtype: torch.dtype, num_rows: int, extras: str) -> None:
    rows, weight = some(num_rows, 72, dtype=dtype), some(2 * 37, 72, dtype=dtype, seed=1)
    bias = some(2 * 37, dtype=dtype) if extras == "bias" else None
    scale = some(72, dtype=dtype, seed=2) if extras == "norm" else None
    entered = rows.float()
    if scale is not None:
        entered = rms_norm(entered, (72,), scale.float(), 0.1)
    both = linear(entered, weight.float(), None if bias is None else bias.float())
    expected = silu(both[:, :37]) * both[:, 37:]
    found = skinny.gated_product(
        rows,
        skinny.Matrix(weight, bias),
        norm=None if scale is None else skinny.Norm(scale, 0.1),
        tiling=TILING,
    )
    limit = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(found, expected.to(dtype), atol=limit, rtol=limit)


def test_nothing_beyond_the_matrix_is_read() -> None:
    dtype = torch.float32
    around = torch.full((64, 72), float("nan"), device=DEVICE)
    around[:37] = some(37, 72, dtype=dtype)
    rows = torch.full((8, 72), float("nan"), device=DEVICE)
    rows[:3] = some(3, 72, dtype=dtype)
    for count in (1, 3):
        found = skinny.product(rows[:count], skinny.Matrix(around[:37], None), tiling=TILING)
        torch.testing.assert_close(found, linear(rows[:count], around[:37]))


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_out", [64, 1 << 13, 1 << 14, 1 << 15])
def test_every_size_has_a_tiling(num_rows: int, num_out: int) -> None:
    tiling = skinny.tiling_of(num_rows, num_out, 4096)
    assert tiling.block_out * tiling.block_in <= 1 << 14


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448], ids=["8.9", "8.0", "9.0"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("num_out", [64, 1 << 13])
def test_tiles_of_several_rows_fit_a_device(
    num_out: int, matrices: int, element_bytes: int, shared_bytes: int
) -> None:
    """Compute capabilities differ in shared memory."""
    for num_rows in (2, 16, 17, 32):
        tiling = skinny.tiling_of(num_rows, num_out, 4096)
        fit = skinny.fitted(tiling, num_rows, matrices, element_bytes, shared_bytes)
        assert skinny.tile_bytes(fit, num_rows, matrices, element_bytes) < shared_bytes
        assert fit.block_in >= 16
        assert fit.stages >= 2
    eight = skinny.tiling_of(8, 1 << 14, 4096)
    assert skinny.fitted(eight, 8, 2, 2, skinny.SHARED_BYTES) == eight  # as measured


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 32])
@pytest.mark.parametrize("num_out", [512, 1 << 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_product_as_it_is_tiled(dtype: torch.dtype, num_out: int, num_rows: int) -> None:
    usable("cuda")
    rows = some(num_rows, 576, dtype=dtype)
    weight = some(2 * num_out, 576, dtype=dtype, seed=1) / 24
    both = linear(rows.float(), weight.float())
    expected = silu(both[:, :num_out]) * both[:, num_out:]
    found = skinny.gated_product(rows, skinny.Matrix(weight, None))
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("rows", "weight", "residual", "match"),
    [
        ((33, 8), (4, 8), None, "1 to 32 rows of 8"),
        ((0, 8), (4, 8), None, "1 to 32 rows of 8"),
        ((2, 9), (4, 8), None, "1 to 32 rows of 8"),
        ((2, 8), (4, 8), (2, 5), r"residual \[2, 4\]"),
    ],
)
def test_refused_shapes(rows: Any, weight: Any, residual: Any, match: str) -> None:
    matrix = skinny.Matrix(torch.zeros(weight), None)
    more = None if residual is None else torch.zeros(residual)
    with pytest.raises(AttentionInputError, match=match):
        skinny.product(torch.zeros(rows), matrix, residual=more)


def test_refused_layouts() -> None:
    with pytest.raises(AttentionInputError, match="weight contiguous"):
        skinny.product(torch.zeros(2, 8), skinny.Matrix(torch.zeros(8, 4).T, None))
    with pytest.raises(AttentionInputError, match=r"weight contiguous in torch\.float32"):
        skinny.product(torch.zeros(2, 8), skinny.Matrix(torch.zeros(4, 8).half(), None))
