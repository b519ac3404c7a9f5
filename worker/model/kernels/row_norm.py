"""RMSNorm of many rows, each read once."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from worker.model.errors import AttentionInputError
from worker.model.kernels.ahead import ahead_of, wait_for_previous

WIDEST: Final = 1 << 14
"""Numbers of a row that one program holds."""
NUMBERS_OF_A_WARP: Final = 1024


@triton.jit
def _row_norm(
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(rows + place, mask=valid, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    found = value * factor * tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=valid)


def row_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rows / sqrt(mean(rows ** 2) + eps) * weight`` of contiguous rows ``[n, width]``,
    computed in float32 and rounded once.

    Raises:
        AttentionInputError: rows are wider than WIDEST, or shapes or strides do not fit.
    """
    if rows.ndim != 2 or not 0 < rows.shape[1] <= WIDEST or weight.shape != rows.shape[1:]:
        raise AttentionInputError(
            f"expected rows of at most {WIDEST} numbers and a weight for each, got "
            f"{list(rows.shape)} and {list(weight.shape)}"
        )
    if not rows.is_contiguous() or not weight.is_contiguous():
        raise AttentionInputError(
            f"expected contiguous rows and weight, got strides {rows.stride()} and "
            f"{weight.stride()}"
        )
    out = torch.empty_like(rows)
    width = rows.shape[1]
    block = triton.next_power_of_2(width)
    if len(rows):
        _row_norm[(len(rows),)](
            rows,
            weight,
            out,
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, min(16, block // NUMBERS_OF_A_WARP)),
            **ahead_of(rows.device),
        )
    return out
