"""A step over pages of one layer, with NaN wherever nothing visible lies, and what attention should
give, written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.model.page_numbers import FLOAT8
from worker.model.step import GroupGeometry, SequenceSlice, order, visible_blocks
from worker.model.step_metadata import MetadataShape, StepMetadata, describe_step
from worker.model.triton_attention import KernelPages

SLOTS = 96


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The shape of everything but the batch."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    block: int = 8
    page: int | None = None
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    query_dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype = torch.float32
    scales: tuple[float, ...] = field(default=())
    """Of the keys of each kv head, then of the values."""


class PagedCase:
    """``lengths`` are pairs of tokens in the pages and new tokens of each sequence."""

    def __init__(
        self, layer: Layer, lengths: Sequence[tuple[int, int]], device: str = "cpu", seed: int = 0
    ) -> None:
        self.layer = layer
        generator = torch.Generator().manual_seed(seed)
        random = np.random.default_rng(seed)
        geometry = GroupGeometry(layer.block, layer.window, layer.sinks, SLOTS, 1)
        self.geometry = geometry
        page = layer.page or layer.block
        shape = (SLOTS, layer.block // page, 2, layer.kv_heads, page, layer.dim)
        # Another layer's bytes lie between two blocks of this one.
        raw = torch.full((SLOTS, 2, *shape[1:]), float("nan")).to(layer.page_dtype)
        self.raw = raw.to(device)
        view = self.raw[:, 1].transpose(1, 2)
        scales = None
        if layer.scales:
            scales = torch.tensor(layer.scales).view(2, layer.kv_heads).to(device)
        self.pages = KernelPages(view if layer.page else view[:, :, 0], 0, geometry, scales)
        free = list(random.permutation(SLOTS))
        batch, histories = [], []
        for start, count in lengths:
            end = start + count
            blocks = -(-end // layer.block)
            table = np.full(blocks, -1, np.int32)
            for ordinal in visible_blocks(start, end, geometry):
                table[ordinal] = free.pop()
            history = torch.randn(end, 2, layer.kv_heads, layer.dim, generator=generator)
            history = history.to(layer.query_dtype).to(device)
            for p in range(start):
                visible = layer.window is None or p > start - layer.window or p < layer.sinks
                if visible:
                    self.row(table, p).copy_(self._stored(history[p]))
            batch.append(
                SequenceSlice(np.zeros(count, np.int32), start, (table,), wants_logits=True)
            )
            histories.append(history)
        flat = order(batch)
        self.pieces = [batch[i] for i in flat]
        self.histories = [histories[i] for i in flat]
        self.new = torch.cat(
            [h[piece.start :] for piece, h in zip(self.pieces, self.histories, strict=True)]
        )
        rows = len(self.new)
        heads = layer.kv_heads * layer.group
        self.query = torch.randn(rows, heads, layer.dim, generator=generator)
        self.query = self.query.to(layer.query_dtype).to(device)

    def metadata(self, shape: MetadataShape | None = None) -> StepMetadata:
        """The batch's metadata, exact or padded."""
        shape = shape or MetadataShape.of(self.pieces, [self.geometry])
        vector = describe_step(self.pieces, [self.geometry], shape)
        return StepMetadata(shape, torch.from_numpy(vector).to(self.raw.device))

    def row(self, table: np.ndarray, position: int) -> torch.Tensor:
        """Where a token lies: ``[2, kv_heads, dim]`` of the pages."""
        page = self.layer.page or self.layer.block
        inside = position % self.layer.block
        slot = self.raw[int(table[position // self.layer.block]), 1]
        return slot[inside // page, :, :, inside % page]

    def _stored(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., 2, kv_heads, dim]`` as pages hold it."""
        if self.pages.scales is None:
            return rows.to(self.layer.page_dtype)
        scaled = rows.float() / self.pages.scales[..., None]
        return scaled.clamp(-448, 448).to(FLOAT8)

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """What attention should see of stored rows: float32."""
        stored = self._stored(rows).float()
        return stored if self.pages.scales is None else stored * self.pages.scales[..., None]

    def expected(self) -> torch.Tensor:
        """Attention by its definition, in float32: ``[rows, heads, dim]``."""
        layer = self.layer
        out: list[torch.Tensor] = []
        for piece, history in zip(self.pieces, self.histories, strict=True):
            keys, values = self.seen(history).repeat_interleave(layer.group, 2).unbind(1)
            queries = self.query[len(out) : len(out) + len(piece.tokens)].float()
            for row, position in zip(queries, range(piece.start, piece.end), strict=True):
                window = layer.window or position + 1
                seen = [p for p in range(position + 1) if p > position - window or p < layer.sinks]
                scores = torch.einsum("phd,hd->hp", keys[seen], row) * layer.dim**-0.5
                if layer.softcap is not None:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                weights = torch.softmax(scores, 1)
                out.append(torch.einsum("hp,phd->hd", weights, values[seen]))
        return torch.stack(out)
