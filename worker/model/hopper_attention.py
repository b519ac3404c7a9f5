"""Which prefills the kernel for capability 9.0 takes, and how they are described to its copies.

Its copies move boxes of whole rows, so all of a layer's pages are seen as one matrix of rows
``[.., head_dim]``. Everything else (windows, softcaps, scaled pages, other widths, pages whose
tokens are not next to each other, other devices) stays with the Triton kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.model.kernels.hopper_prefill import GROUPS, KEYS, QUERIES, hopper_prefill_tile
from worker.model.step_metadata import StepMetadata

CAPABILITY: Final = (9, 0)
WIDTHS: Final = (64, 128)
LEAST_BOX: Final = 16
"""Rows; a box of fewer than 8 is no whole part of a tile in shared memory."""
ALIGNMENT: Final = 16
"""Bytes: of addresses and of strides between rows."""
MOST_ROWS: Final = 2**31


@dataclass(frozen=True, eq=False)
class HopperPages:
    """One layer's pages as rows. ``strides``: rows between slots, from keys to values, between
    pages and between heads.
    """

    rows: TensorDescriptor
    strides: tuple[int, int, int, int]
    box: int

    @classmethod
    def of(cls, by_page: torch.Tensor) -> HopperPages | None:
        """None where the pages ``[num_slots, 2, pages_per_block, num_kv_heads, tokens_per_page,
        head_dim]`` are no such matrix, or the device has no use for one.
        """
        if by_page.device.type != "cuda":
            return None
        if torch.cuda.get_device_capability(by_page.device) != CAPABILITY:
            return None
        rows = rows_of(by_page)
        if rows is None:
            return None
        count, strides, box = rows
        dim = by_page.shape[-1]
        return cls(
            TensorDescriptor(by_page, [count, dim], [dim, 1], [box, dim], _swizzled()), strides, box
        )

    def takes(self, query: torch.Tensor, scale: float) -> bool:
        """Whether ``query`` ``[rows, heads, head_dim]`` can be copied in boxes too."""
        row, head, _ = query.stride()
        return (
            query.dtype == self.rows.base.dtype
            and head == query.shape[2]
            and row * query.itemsize % ALIGNMENT == 0
            and query.data_ptr() % ALIGNMENT == 0
            and scale > 0.0
        )


def rows_of(by_page: torch.Tensor) -> tuple[int, tuple[int, int, int, int], int] | None:
    """Rows up to the end of the pages, rows between slots, kinds, pages and heads, and rows of a
    box; None where copies by row can't read the pages.
    """
    dim, tokens = by_page.shape[-1], by_page.shape[-2]
    slot, kind, page, head, token, element = by_page.stride()
    box = math.gcd(tokens, KEYS.value)
    if by_page.dtype not in {torch.float16, torch.bfloat16} or dim not in WIDTHS:
        return None
    if (token, element) != (dim, 1) or any(step % dim for step in (slot, kind, page, head)):
        return None
    strides = (slot // dim, kind // dim, page // dim, head // dim)
    steps = zip(strides, by_page.shape[:4], strict=True)
    count = tokens + sum(step * (size - 1) for step, size in steps)
    if box < LEAST_BOX or by_page.data_ptr() % ALIGNMENT or count >= MOST_ROWS:
        return None
    return count, strides, box


def hopper_prefill(
    pages: HopperPages,
    group: int,
    metadata: StepMetadata,
    query: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """The rows of a step that are no decodes. ``scale`` is in units of log2; ``query`` is one that
    ``pages`` takes, ``out`` ``[rows, heads, head_dim]`` contiguous.
    """
    rows, heads, dim = query.shape
    _, _, pages_per_block, kv_heads, tokens_per_page, _ = pages.rows.base.shape
    queries = TensorDescriptor(
        query,
        [rows, heads * dim],
        [query.stride(0), 1],
        [QUERIES.value // GROUPS.value, dim],
        _swizzled(),
    )
    table = metadata.groups[group].block_table
    slot, kind, page, head = pages.strides
    hopper_prefill_tile[(heads, metadata.shape.tiles)](
        pages.rows,
        queries,
        table,
        metadata.starts,
        metadata.lengths,
        metadata.first_rows,
        metadata.tile_sequences,
        metadata.tile_offsets,
        out,
        scale,
        slot,
        kind,
        page,
        head,
        table.stride(0),
        out.stride(0),
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_TOKENS=pages_per_block * tokens_per_page,
        PAGE_TOKENS=tokens_per_page,
        BOX=pages.box,
        num_warps=4,
    )


def _swizzled() -> NVMMASharedLayout:
    """Rows of 128 bytes swizzled, elements of 16 bits."""
    return NVMMASharedLayout(128, 16)
