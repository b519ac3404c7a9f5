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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.model.kernels.hopper import ALIGNMENT, KINDS, can_be_copied, in_boxes, is_hopper
from worker.model.kernels.hopper_prefill import GROUPS, KEYS, QUERIES, hopper_prefill_tile
from worker.model.step_metadata import StepMetadata

WIDTHS: Final = (64, 128)
LEAST_BOX: Final = 16
"""Rows; a box of fewer than 8 is no whole part of a tile in shared memory."""
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
        rows = rows_of(by_page) if is_hopper(by_page.device) else None
        if rows is None:
            return None
        count, strides, box = rows
        dim = by_page.shape[-1]
        return cls(in_boxes(by_page, (count, dim), dim, (box, dim)), strides, box)

    def takes(self, query: torch.Tensor, scale: float) -> bool:
        """Whether ``query`` ``[rows, heads, head_dim]`` can be copied in boxes too."""
        return (
            scale > 0.0
            and query.dtype == self.rows.base.dtype
            and query.stride(1) == query.shape[2]
            and can_be_copied(query[:, 0])
        )


def rows_of(by_page: torch.Tensor) -> tuple[int, tuple[int, int, int, int], int] | None:
    """Rows up to the end of the pages, rows between slots, kinds, pages and heads, and rows of a
    box; None where copies by row can't read the pages.
    """
    dim, tokens = by_page.shape[-1], by_page.shape[-2]
    slot, kind, page, head, token, element = by_page.stride()
    box = math.gcd(tokens, KEYS.value)
    if by_page.dtype not in KINDS or dim not in WIDTHS:
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
    half = (QUERIES.value // GROUPS.value, dim)
    queries = in_boxes(query, (rows, heads * dim), query.stride(0), half)
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
