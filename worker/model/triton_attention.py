"""The ``triton`` attention backend: kernels over the pages as they lie, for a step described
by one vector of metadata.

Nothing here waits for the device, allocates by length or reads a length on the host: launches
depend on the metadata's shape alone, so calls can be captured in a CUDA graph. New keys and values
are written first; attention then reads everything from the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from worker.model.errors import AttentionInputError
from worker.model.hopper_attention import HopperPages, hopper_prefill
from worker.model.kernels.ahead import ahead_of
from worker.model.kernels.page_write import write_rows
from worker.model.kernels.paged_decode import decode_part, join_parts
from worker.model.kernels.paged_prefill import prefill_tile
from worker.model.kernels.scoring import LOG2_E
from worker.model.kernels.tilings import (
    LEAST_DOT,
    Tiling,
    decode_tiling,
    prefill_tiling,
    splits_of,
    width_of,
)
from worker.model.page_numbers import FLOAT8_LIMIT, PageNumbers
from worker.model.step import GroupGeometry
from worker.model.step_metadata import TILE_TOKENS, StepMetadata


class KernelPages:
    """One layer's pages as kernels address them.

    ``pages`` is a view ``[num_slots, 2, num_kv_heads, tokens_per_block, head_dim]``, or with
    smaller pages ``[num_slots, 2, pages_per_block, num_kv_heads, tokens_per_page, head_dim]``, any
    strides but the last, which is 1. ``scales`` as :class:`PageNumbers` says.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        group: int,
        geometry: GroupGeometry,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Raises AttentionInputError: shape, stride, dtype, scales or block size do not fit."""
        if pages.ndim not in {5, 6} or pages.shape[1] != 2 or pages.stride(-1) != 1:
            raise AttentionInputError(
                "expected pages [num_slots, 2, (pages_per_block,) num_kv_heads, tokens_per_page, "
                f"head_dim] with contiguous vectors, got {list(pages.shape)} with strides "
                f"{pages.stride()}"
            )
        by_page = pages if pages.ndim == 6 else pages.unsqueeze(2)
        _, _, per_block, self.num_kv_heads, self.tokens_per_page, self.head_dim = by_page.shape
        self.tokens_per_block = per_block * self.tokens_per_page
        if self.tokens_per_block != geometry.tokens_per_block:
            raise AttentionInputError(
                f"expected blocks of {geometry.tokens_per_block} tokens, the pages have "
                f"{self.tokens_per_block}"
            )
        self.numbers = PageNumbers(pages, self.num_kv_heads, scales)
        self.pages = pages
        self.scales = scales
        self.group = group
        self.dtype = pages.dtype
        self.device = pages.device
        self.window = geometry.window
        self.sink_tokens = geometry.sink_tokens if geometry.window is not None else 0
        slot, kind, page, head, token, _ = by_page.stride()
        self.strides = (slot, kind, page, head, token)
        """Elements between slots, from keys to values, between pages, heads and tokens."""
        is_plain = scales is None and self.window is None
        self.boxes = HopperPages.of(by_page) if is_plain else None
        """The same pages for the prefill kernel of capability 9.0, where it can read them."""


class TritonAttention:
    """The layers of one model. ``tilings`` are chosen by dtype and head_dim."""

    def __init__(self, layers: Sequence[KernelPages]) -> None:
        self.layers = tuple(layers)

    def attend(
        self,
        metadata: StepMetadata,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write the new rows of layer ``index`` and attend: see :func:`read` and :func:`write`."""
        layer = self.layers[index]
        check_query(layer, metadata, query)
        write(layer, metadata, key_value, query.dtype)
        return read(layer, metadata, query, scale, softcap)


def write(
    layer: KernelPages, metadata: StepMetadata, key_value: torch.Tensor, dtype: torch.dtype
) -> None:
    """Store new keys and values ``[rows, 2, num_kv_heads, head_dim]``, strided, in their pages.

    Raises:
        AttentionInputError: they do not cover the step's rows, or differ from ``dtype``, the
            query's, or in device.
    """
    rows = metadata.shape.rows
    expected = (rows, 2, layer.num_kv_heads, layer.head_dim)
    if key_value.shape != expected:
        raise AttentionInputError(
            f"expected key and value rows for every token of the step, {list(expected)}, "
            f"got {list(key_value.shape)}"
        )
    layer.numbers.check("key and value", key_value, dtype)
    group = metadata.groups[layer.group]
    write_rows[(rows, 2)](
        key_value,
        layer.pages,
        layer.scales,
        group.write_slots,
        group.write_offsets,
        *key_value.stride()[:3],
        *layer.strides,
        NUM_KV=layer.num_kv_heads,
        DIM=layer.head_dim,
        PAGE_TOKENS=layer.tokens_per_page,
        SCALED=layer.scales is not None,
        LIMIT=FLOAT8_LIMIT,
        HEADS=triton.next_power_of_2(layer.num_kv_heads),
        WIDTH=width_of(layer.head_dim),
    )


def read(
    layer: KernelPages,
    metadata: StepMetadata,
    query: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of ``query`` ``[rows, heads, head_dim]``, strided, over what the pages hold.

    Returns ``[rows, heads, head_dim]``, contiguous, in the query's dtype; padding rows, and those
    that no tile of the metadata has, are not written.

    Raises:
        AttentionInputError: see :func:`check_query`.
    """
    check_query(layer, metadata, query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if metadata.shape.decodes:
        tiling = decode_tiling(_wider(layer, query), layer.head_dim)
        tokens = metadata.groups[layer.group].block_table.shape[1] * layer.tokens_per_block
        splits = splits_of(
            metadata.shape.decodes, layer.num_kv_heads, triton.cdiv(tokens, tiling.keys)
        )
        decode(layer, metadata, query, out, _scoring(scale, softcap), tiling, splits)
    if not metadata.shape.tiles:
        return out
    if layer.boxes is not None and softcap is None and layer.boxes.takes(query, scale):
        hopper_prefill(layer.boxes, layer.group, metadata, query, out, scale * LOG2_E)
    else:
        chosen = prefill_tiling(_wider(layer, query), layer.head_dim)
        prefill(layer, metadata, query, out, _scoring(scale, softcap), chosen)
    return out


def _scoring(scale: float, softcap: float | None) -> tuple[float, float]:
    """As :func:`decode` takes it."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale, softcap)


def _wider(layer: KernelPages, query: torch.Tensor) -> torch.dtype:
    """Products are in the query's type, whatever the pages hold."""
    return max(query.dtype, layer.dtype, key=lambda kind: kind.itemsize)


def check_query(layer: KernelPages, metadata: StepMetadata, query: torch.Tensor) -> None:
    """Raises:
    AttentionInputError: shape, dtype, device or strides do not fit the pages and the step.
    """
    rows, kv_heads, dim = metadata.shape.rows, layer.num_kv_heads, layer.head_dim
    if query.ndim != 3 or query.shape[::2] != (rows, dim) or query.shape[1] % kv_heads:
        raise AttentionInputError(
            f"expected query [{rows}, multiple of {kv_heads}, {dim}], got {list(query.shape)}"
        )
    layer.numbers.check("query", query, query.dtype)
    if metadata.vector.device != layer.device:
        raise AttentionInputError(
            f"expected step metadata on {layer.device} as the pages are, got "
            f"{metadata.vector.device}"
        )


def decode(
    layer: KernelPages,
    metadata: StepMetadata,
    query: torch.Tensor,
    out: torch.Tensor,
    scoring: tuple[float, float],
    tiling: Tiling,
    splits: int,
) -> None:
    """The single-token rows of a step. ``scoring``: scale and softcap; without a cap, which is 0,
    the scale is in units of log2.
    """
    sequences, heads, dim = metadata.shape.decodes, query.shape[1], layer.head_dim
    table = metadata.groups[layer.group].block_table
    group = heads // layer.num_kv_heads
    sums, totals = out, out
    if splits > 1:
        parts = (sequences, heads, splits)
        sums = torch.empty((*parts, dim), dtype=torch.float32, device=out.device)
        totals = torch.empty(parts, dtype=torch.float32, device=out.device)
    decode_part[(layer.num_kv_heads, splits, sequences)](
        query,
        layer.pages,
        layer.scales,
        table,
        metadata.lengths,
        sums,
        totals,
        out,
        *scoring,
        *query.stride()[:2],
        *layer.strides,
        table.stride(0),
        num_kv=layer.num_kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_TOKENS=layer.tokens_per_block,
        PAGE_TOKENS=layer.tokens_per_page,
        WINDOW=layer.window or 0,
        SINKS=layer.sink_tokens,
        CAPPED=scoring[1] > 0,
        SCALED=layer.scales is not None,
        SPLITS=splits,
        HEADS=max(LEAST_DOT, triton.next_power_of_2(group)),
        WIDTH=width_of(dim),
        KEYS=tiling.keys,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **ahead_of(query.device),
    )
    if splits > 1:
        join_parts[(heads, sequences)](
            sums,
            totals,
            metadata.lengths,
            out,
            num_heads=heads,
            DIM=dim,
            SPLITS=splits,
            WIDTH=width_of(dim),
            num_warps=1 if splits <= 8 else 4,
            **ahead_of(query.device),
        )


def prefill(
    layer: KernelPages,
    metadata: StepMetadata,
    query: torch.Tensor,
    out: torch.Tensor,
    scoring: tuple[float, float],
    tiling: Tiling,
) -> None:
    """The other rows; arguments as for :func:`decode`."""
    heads, dim = query.shape[1], layer.head_dim
    table = metadata.groups[layer.group].block_table
    cuts = TILE_TOKENS // tiling.queries
    prefill_tile[(heads, metadata.shape.tiles * cuts)](
        query,
        layer.pages,
        layer.scales,
        table,
        metadata.starts,
        metadata.lengths,
        metadata.first_rows,
        metadata.tile_sequences,
        metadata.tile_offsets,
        out,
        *scoring,
        *query.stride()[:2],
        *layer.strides,
        table.stride(0),
        num_kv=layer.num_kv_heads,
        GROUP=heads // layer.num_kv_heads,
        DIM=dim,
        BLOCK_TOKENS=layer.tokens_per_block,
        PAGE_TOKENS=layer.tokens_per_page,
        WINDOW=layer.window or 0,
        SINKS=layer.sink_tokens,
        CAPPED=scoring[1] > 0,
        SCALED=layer.scales is not None,
        CUTS=cuts,
        QUERIES=tiling.queries,
        WIDTH=width_of(dim),
        KEYS=tiling.keys,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
