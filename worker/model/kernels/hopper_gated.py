"""``silu(gate) * up`` of a decode batch, for compute capability 9.0: too many rows for the kernels
of few, too few for time to be anything but the matrix read from memory.

A program has all rows and as many columns of gate and up. One warp copies tiles of the matrix and
of the rows to shared memory, those of the matrix while the kernel in front still runs; four warps
multiply. Sums are float32 and rounded once, behind the activation.

On two H200s, 64 rows, ``[28,672, 4,096]``, with the norm before: 62 and 64 us, where cuBLAS and an
activation kernel take 69 and 72. Products without a gate gained nothing this way (qkv 16.7 for 16.2
us, output 13.4 for 12.3, down with its inputs split 35.1 for 36.2).
"""

from __future__ import annotations

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from worker.model.kernels.ahead import ahead_of, wait_for_previous
from worker.model.kernels.gluon_names import load_box, wait_for_group
from worker.model.kernels.hopper import can_be_copied, in_boxes, is_hopper

MOST_ROWS: Final = 64
COLUMNS: Final = 128
"""Of gate, and of up, in a program."""
INPUTS: Final = 64
"""Of a tile."""
STAGES: Final = 4
"""Tiles in flight: 160 KB of shared memory."""


@gluon.jit
def _load_tile(  # type: ignore[no-untyped-def]
    weight, gate_row, up_row, column, full, tile, COLUMNS: gl.constexpr
):  # fmt: skip
    load_box(weight, [gate_row, column], full, tile.slice(0, COLUMNS))
    load_box(weight, [up_row, column], full, tile.slice(COLUMNS, COLUMNS))


@gluon.jit
def _load(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    weight, rows, gate_row, up_row, tiles, buffers,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """What the copying warp does."""
    w_tiles, x_tiles, full, empty = buffers
    BYTES: gl.constexpr = (2 * COLUMNS + ROWS) * INPUTS * 2
    for tile in gl.static_range(STAGES):
        mbarrier.expect(full.index(tile), BYTES)
        _load_tile(
            weight, gate_row, up_row, tile * INPUTS, full.index(tile), w_tiles.index(tile), COLUMNS
        )
    # Nobody writes weights; the rows are another kernel's.
    wait_for_previous(AHEAD)
    for tile in gl.static_range(STAGES):
        load_box(rows, [0, tile * INPUTS], full.index(tile), x_tiles.index(tile))
    for tile in range(STAGES, tiles):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), tile // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _load_tile(
            weight, gate_row, up_row, tile * INPUTS, full.index(stage), w_tiles.index(stage),
            COLUMNS,
        )  # fmt: skip
        load_box(rows, [0, tile * INPUTS], full.index(stage), x_tiles.index(stage))


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    out, out_row, first_out, num_rows, tiles, buffers,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of four warps does. It writes once the rows have come, so once the kernel in
    front has ended.
    """
    w_tiles, x_tiles, full, empty = buffers
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    gate = gl.zeros([ROWS, COLUMNS], gl.float32, summed)
    up = gl.zeros([ROWS, COLUMNS], gl.float32, summed)
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(full.index(stage), tile // STAGES & 1)
        x = x_tiles.index(stage)
        w = w_tiles.index(stage)
        gate = warpgroup_mma(x, w.slice(0, COLUMNS).permute((1, 0)), gate, is_async=True)
        up = warpgroup_mma(x, w.slice(COLUMNS, COLUMNS).permute((1, 0)), up, is_async=True)
        # Both products of the tile before have ended.
        gate, up = warpgroup_mma_wait(2, [gate, up])
        wait_for_group()
        mbarrier.arrive(empty.index((tile + STAGES - 1) % STAGES), pred=tile > 0)
    gate, up = warpgroup_mma_wait(0, [gate, up])
    found = gate / (1.0 + gl.exp(-gate)) * up
    answer = gl.convert_layout(found.to(out.dtype.element_ty), plain)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    column = first_out + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, plain))
    gl.store(out + row[:, None] * out_row + column[None, :], answer, mask=(row < num_rows)[:, None])


@gluon.jit
def hopper_gated_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    weight, rows, out, num_rows, num_out, num_in, out_row,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """``weight`` ``[2 * num_out, num_in]``, gate above up, in boxes of COLUMNS x INPUTS; ``rows``
    in boxes of ROWS x INPUTS. Needs 4 warps.
    """
    first_out = gl.program_id(0) * COLUMNS
    tiles = num_in // INPUTS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    w_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, 2 * COLUMNS, INPUTS], swizzled)
    x_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, INPUTS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    buffers = (w_tiles, x_tiles, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (out, out_row, first_out, num_rows, tiles, buffers, ROWS, COLUMNS, STAGES)),
            (_load, (
                weight, rows, first_out, num_out + first_out, tiles, buffers,
                ROWS, COLUMNS, INPUTS, STAGES, AHEAD,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def takes(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`gated_rows` can have them."""
    num_out, num_in = weight.shape
    return (
        0 < len(rows) <= MOST_ROWS
        and num_out % (2 * COLUMNS) == 0
        and num_in % INPUTS == 0
        and num_in >= STAGES * INPUTS
        and rows.dtype == weight.dtype
        and is_hopper(rows.device)
        and can_be_copied(rows)
        and can_be_copied(weight)
    )


def gated_rows(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` where ``rows @ weight.T`` is ``[gate, up]``, for what :func:`takes` says.

    Returns ``[len(rows), len(weight) / 2]``, contiguous.
    """
    num_rows, num_in = rows.shape
    num_out = len(weight) // 2
    out = rows.new_empty(num_rows, num_out)
    hopper_gated_rows[(num_out // COLUMNS,)](
        in_boxes(weight, (2 * num_out, num_in), weight.stride(0), (COLUMNS, INPUTS)),
        in_boxes(rows, (num_rows, num_in), rows.stride(0), (MOST_ROWS, INPUTS)),
        out,
        num_rows,
        num_out,
        num_in,
        num_out,
        ROWS=MOST_ROWS,
        COLUMNS=COLUMNS,
        INPUTS=INPUTS,
        STAGES=STAGES,
        num_warps=4,
        **ahead_of(rows.device),
    )
    return out
