"""SiLU(gate) * up of many rows, in one pass."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from worker.model.kernels.ahead import ahead_of, wait_for_previous

BLOCK: Final = 1024
WARPS: Final = 4


@triton.jit
def _silu_product(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=valid, other=0.0).to(tl.float32)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, found.to(out.dtype.element_ty), mask=valid)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of contiguous rows ``[n, gate and up]``: ``[n, width]``."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _silu_product[grid](
        gate_up, out, width, BLOCK=BLOCK, num_warps=WARPS, **ahead_of(gate_up.device)
    )
    return out
