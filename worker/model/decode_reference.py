"""Decode attention in torch, a sequence at a time: what kernels are compared to, and what a CPU
without kernels runs. It reads the metadata on the host, so it cannot be captured.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from worker.model.attention import LayerPages
from worker.model.decode import DecodeAttention
from worker.model.step import GroupGeometry, visible_blocks
from worker.model.step_metadata import StepMetadata


class ReferenceDecode(DecodeAttention):
    """Reads pages by the block table; rows of padding sequences are zero."""

    def __init__(
        self, layers: tuple[LayerPages, ...], geometries: tuple[GroupGeometry, ...]
    ) -> None:
        self._layers = layers
        self._geometries = geometries

    @override
    def read(
        self, metadata: StepMetadata, index: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        layer = self._layers[index]
        geometry = self._geometries[layer.group]
        table = metadata.groups[layer.group].block_table
        found = query.new_zeros(query.shape)
        for row, length in enumerate(metadata.lengths.tolist()):
            if not length:
                continue
            blocks = torch.from_numpy(visible_blocks(length - 1, length, geometry))
            offsets = torch.arange(geometry.tokens_per_block)
            positions = (blocks[:, None] * geometry.tokens_per_block + offsets).flatten()
            seen = positions < length
            if geometry.window is not None:
                near = positions >= length - geometry.window
                seen &= near | (positions < geometry.sink_tokens)
            slots = table[row, blocks.to(table.device)].long()
            # [2, num_kv_heads, keys, head_dim]
            keys, values = layer.by_head.index_select(2, slots).flatten(2, 3)[:, :, seen]
            queries = query[row].view(layer.num_kv_heads, -1, layer.head_dim)
            found[row] = scaled_dot_product_attention(queries, keys, values, scale=scale).view(
                found[row].shape
            )
        return found
