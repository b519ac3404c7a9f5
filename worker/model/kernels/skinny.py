"""Products of few rows with a large matrix, where time is the matrix read from memory once.

What stands around a product in a decoder layer is part of it: RMSNorm of the input, bias, residual,
and SiLU(gate) * up of a matrix that holds gate above up. The norm costs no pass of its own: its
factor is one number a row, found while the row is read, and multiplies the finished sums.

One row is summed in registers; 2 to MOST_ROWS go through tensor cores, the matrix being the left
operand. A float32 sum is rounded once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from worker.model.errors import AttentionInputError
from worker.model.kernels.ahead import ahead_of, wait_for_previous

MOST_ROWS: Final = 32
"""Rows above which a general product is the faster one."""
LEAST_DOT_ROWS: Final = 16
"""What a tensor core product is padded to."""


@dataclass(frozen=True)
class Tiling:
    """Outputs and inputs of a tile, warps of a program, tiles in flight."""

    block_out: int
    block_in: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Matrix:
    """``weight`` ``[out, in]``, contiguous; ``bias`` ``[out]`` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the rows that enter a product: ``weight`` ``[in]``."""

    weight: torch.Tensor
    eps: float


@triton.jit
def _one_row(  # noqa: PLR0913
    rows: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    valid = outs < num_out
    ins = tl.arange(0, BLOCK_IN)
    first = weight + outs.to(tl.int64)[:, None] * NUM_IN + ins[None, :]
    second = first + num_out.to(tl.int64) * NUM_IN
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    upper = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in range(0, NUM_IN, BLOCK_IN):
        if NUM_IN % BLOCK_IN == 0:  # noqa: SIM108
            inside = ins >= 0
        else:
            inside = start + ins < NUM_IN
        value = tl.load(rows + start + ins, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += value * value
            value *= tl.load(norm + start + ins, mask=inside, other=0.0).to(tl.float32)
        seen = valid[:, None] & inside[None, :]
        tile = tl.load(first + start, mask=seen, other=0.0, eviction_policy="evict_first")
        total += tile.to(tl.float32) * value[None, :]
        if GATED:
            tile = tl.load(second + start, mask=seen, other=0.0, eviction_policy="evict_first")
            upper += tile.to(tl.float32) * value[None, :]
    found = tl.sum(total, 1)
    up = tl.sum(upper, 1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_IN + eps)
        found *= factor
        up *= factor
    if HAS_BIAS:
        found += tl.load(bias + outs, mask=valid, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias + num_out + outs, mask=valid, other=0.0).to(tl.float32)
        found = found / (1.0 + tl.exp(-found)) * up
    if HAS_RESIDUAL:
        found += tl.load(residual + outs, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + outs, found.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _few_rows(  # noqa: PLR0913
    rows: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NUM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    valid = outs < num_out
    ins = tl.arange(0, BLOCK_IN)
    row = tl.arange(0, ROWS)
    present = row < num_rows
    first = weight + outs.to(tl.int64)[:, None] * NUM_IN + ins[None, :]
    second = first + num_out.to(tl.int64) * NUM_IN
    source = rows + row[None, :] * NUM_IN + ins[:, None]
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    upper = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, NUM_IN, BLOCK_IN):
        if NUM_IN % BLOCK_IN == 0:  # noqa: SIM108
            inside = ins >= 0
        else:
            inside = start + ins < NUM_IN
        value = tl.load(source + start, mask=inside[:, None] & present[None, :], other=0.0)
        if HAS_NORM:
            exact = value.to(tl.float32)
            squares += tl.sum(exact * exact, 0)
            scale = tl.load(norm + start + ins, mask=inside, other=0.0).to(tl.float32)
            value = (exact * scale[:, None]).to(rows.dtype.element_ty)
        seen = valid[:, None] & inside[None, :]
        tile = tl.load(first + start, mask=seen, other=0.0, eviction_policy="evict_first")
        total = tl.dot(tile, value, total, input_precision="ieee")
        if GATED:
            tile = tl.load(second + start, mask=seen, other=0.0, eviction_policy="evict_first")
            upper = tl.dot(tile, value, upper, input_precision="ieee")
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(squares / NUM_IN + eps)
        total *= factor[None, :]
        upper *= factor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=valid, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            upper += tl.load(bias + num_out + outs, mask=valid, other=0.0).to(tl.float32)[:, None]
        total = total / (1.0 + tl.exp(-total)) * upper
    kept = valid[:, None] & present[None, :]
    place = row[None, :] * num_out + outs[:, None]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=kept)


ONE_ROW: Final = (
    (1 << 15, 0, Tiling(8, 1024, 8, 3)),
    (1 << 13, 0, Tiling(2, 4096, 8, 2)),
    (1 << 12, 1 << 13, Tiling(2, 2048, 4, 3)),
    (6 << 10, 0, Tiling(16, 512, 4, 3)),
    (0, 0, Tiling(2, 2048, 8, 3)),
)
"""(least outputs, least inputs, tiling), the first that fits: on an H200 the best of 60 for the
products of an 8B Llama, chosen within a whole step. Alone, over a matrix out of L2, others were up
to 5 % faster that are slower between their neighbours (gate and up 4 x 1024, 2.8 % of a step).
"""
FEW_ROWS: Final = ((1 << 13, 0, Tiling(128, 128, 8, 3)), (0, 0, Tiling(64, 256, 4, 4)))
"""The same for tensor cores, at 8 rows: 4,487 (4,364), 4,092 (4,180), 3,647 (3,682), 3,121 (3,225),
2,683 (2,525).
"""


SHARED_BYTES: Final = 232_448
"""Of a program at capability 9.0, which the tables are for."""
SPARE_BYTES: Final = 4096
"""Of them for what is no tile."""
LEAST_STAGES: Final = 2


def tiling_of(num_rows: int, num_out: int, num_in: int) -> Tiling:
    """The tiling of a product, from the tables above."""
    table = ONE_ROW if num_rows == 1 else FEW_ROWS
    return next(
        tiling
        for least_out, least_in, tiling in table
        if num_out >= least_out and num_in >= least_in
    )


def tile_bytes(tiling: Tiling, num_rows: int, matrices: int, element_bytes: int) -> int:
    """Shared memory of tiles in flight where several rows are multiplied with so many matrices."""
    vectors = matrices * tiling.block_out + _padded(num_rows)
    return tiling.stages * vectors * tiling.block_in * element_bytes


def fitted(
    tiling: Tiling, num_rows: int, matrices: int, element_bytes: int, shared_bytes: int
) -> Tiling:
    """The tiling with fewer stages, then smaller tiles, until it fits a device."""
    while tile_bytes(tiling, num_rows, matrices, element_bytes) > shared_bytes - SPARE_BYTES:
        if tiling.stages > LEAST_STAGES:
            tiling = replace(tiling, stages=tiling.stages - 1)
        else:
            tiling = replace(tiling, block_in=tiling.block_in // 2)
    return tiling


def product(
    rows: torch.Tensor,
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """``norm(rows) @ weight.T + bias + residual`` for ``rows`` ``[n <= MOST_ROWS, in]``.

    Returns ``[n, out]`` in the rows' dtype. ``residual`` has that shape and is not changed.

    Raises:
        AttentionInputError: shapes, strides or dtypes do not fit.
    """
    out = rows.new_empty(len(rows), len(matrix.weight))
    _launch(rows, matrix, norm, residual, out, tiling or _own(rows, out, 1))
    return out


def gated_product(
    rows: torch.Tensor,
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """``silu(gate) * up`` where ``norm(rows) @ weight.T + bias`` is ``[gate, up]``.

    Returns ``[n, out / 2]``.

    Raises:
        AttentionInputError: see :func:`product`.
    """
    out = rows.new_empty(len(rows), len(matrix.weight) // 2)
    _launch(rows, matrix, norm, None, out, tiling or _own(rows, out, 2))
    return out


def _launch(
    rows: torch.Tensor,
    matrix: Matrix,
    norm: Norm | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
) -> None:
    weight, bias = matrix.weight, matrix.bias
    _check(rows, weight, residual, out)
    num_rows, num_out = out.shape
    pointers = (
        rows,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        weight if residual is None else residual,
        out,
    )
    eps = 0.0 if norm is None else norm.eps
    options: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": len(weight) != num_out,
        "NUM_IN": weight.shape[1],
        "BLOCK_OUT": tiling.block_out,
        "BLOCK_IN": min(tiling.block_in, triton.next_power_of_2(weight.shape[1])),
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **ahead_of(rows.device),
    }
    grid = (triton.cdiv(num_out, tiling.block_out),)
    if num_rows == 1:
        _one_row[grid](*pointers, num_out, eps, **options)
        return
    _few_rows[grid](*pointers, num_rows, num_out, eps, ROWS=_padded(num_rows), **options)


def _padded(num_rows: int) -> int:
    padded: int = triton.next_power_of_2(num_rows)
    return max(LEAST_DOT_ROWS, padded)


def _own(rows: torch.Tensor, out: torch.Tensor, matrices: int) -> Tiling:
    tiling = tiling_of(len(rows), out.shape[1], rows.shape[1])
    if len(rows) == 1:
        return tiling
    return fitted(tiling, len(rows), matrices, rows.itemsize, _shared_bytes(rows.device))


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    found: int = properties.shared_memory_per_block_optin
    return found


def _check(
    rows: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    if rows.ndim != 2 or not 0 < len(rows) <= MOST_ROWS or rows.shape[1] != weight.shape[1]:
        raise AttentionInputError(
            f"expected 1 to {MOST_ROWS} rows of {weight.shape[1]} numbers, got {list(rows.shape)}"
        )
    if residual is not None and residual.shape != out.shape:
        raise AttentionInputError(
            f"expected a residual {list(out.shape)}, got {list(residual.shape)}"
        )
    for name, part in (("rows", rows), ("weight", weight), ("residual", residual)):
        if part is None:
            continue
        if not part.is_contiguous() or part.dtype != rows.dtype or part.device != rows.device:
            raise AttentionInputError(
                f"expected {name} contiguous in {rows.dtype} on {rows.device}, "
                f"got {part.dtype} on {part.device} with strides {part.stride()}"
            )
