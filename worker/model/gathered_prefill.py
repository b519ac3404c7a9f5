"""Prefills of the ``triton`` backend in torch's attention: keys and values of one sequence gathered
from its pages, or the chunk's own rows where nothing comes before them.

For full attention over blocks of one page; windows and caps stay with the kernel. Which tables and
rows is read from the step's metadata on the device, so nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core.arithmetic import ceil_div
from worker.model.attention import LayerPages, Scratch, check_rows
from worker.model.prefill_choice import AttentionShape, PrefillRates, torch_is_faster
from worker.model.step import SequenceSlice


@dataclass(frozen=True)
class GatheredSpan:
    """One sequence with several queries: row ``sequence`` of the block table, ``rows`` of the flat
    batch, keys ``0 .. end`` of which all before the first query lie in pages.
    """

    sequence: int
    rows: slice
    start: int
    end: int


def gathered_spans(pieces: Sequence[SequenceSlice]) -> tuple[GatheredSpan, ...]:
    """Those of a batch in flat order."""
    counts = [len(piece.tokens) for piece in pieces]
    ends = accumulate(counts)
    return tuple(
        GatheredSpan(number, slice(end - count, end), piece.start, piece.end)
        for number, (piece, count, end) in enumerate(zip(pieces, counts, ends, strict=True))
        if count > 1
    )


@dataclass(frozen=True)
class GatheringLayers:
    """Layers, by the model's index, whose prefills torch's attention can compute."""

    layers: Mapping[int, LayerPages]
    rates: PrefillRates
    scratch: Scratch


@dataclass(frozen=True)
class GatheredPrefill:
    """The prefills of one step. ``tables``, one a layer group: int ``[sequences, blocks]`` on the
    device.
    """

    gathering: GatheringLayers
    spans: tuple[GatheredSpan, ...]
    tables: tuple[torch.Tensor, ...]

    def takes(self, index: int, num_heads: int) -> bool:
        """Whether layer ``index`` is faster so, with this many query heads."""
        layer = self.gathering.layers.get(index)
        if layer is None:
            return False
        shape = AttentionShape(
            heads=num_heads,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            element_bytes=layer.numbers.dtype.itemsize,
        )
        chunks = [(span.start, span.end - span.start) for span in self.spans]
        return torch_is_faster(chunks, shape, self.gathering.rates)

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Fill the spans' rows of ``out`` ``[T, heads, head_dim]``.

        ``query`` likewise, ``key_value`` ``[T, 2, num_kv_heads, head_dim]``: in the pages already.

        Raises:
            AttentionInputError: they do not cover the step's rows, or differ in type or device.
        """
        layer = self.gathering.layers[index]
        check_rows(layer, len(out), query, key_value)
        queries = query.unflatten(1, (layer.num_kv_heads, -1))
        found = out.unflatten(1, (layer.num_kv_heads, -1))
        for span in self.spans:
            seen = self._seen(layer, span, key_value[span.rows], query.dtype)
            group = queries.shape[2]
            keys, values = (rows.unsqueeze(1).expand(-1, group, -1, -1) for rows in seen)
            own = queries[span.rows].permute(1, 2, 0, 3)
            found[span.rows] = _causal(own, keys, values, scale).permute(2, 0, 1, 3)

    def _seen(
        self, layer: LayerPages, span: GatheredSpan, rows: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values ``[num_kv_heads, end, head_dim]`` as the pages hold them."""
        if span.start == 0:
            held = layer.numbers.seen(layer.numbers.stored(rows), dtype)
            return held.permute(1, 2, 0, 3).unbind(0)
        table = self.tables[layer.group][span.sequence]
        blocks = table[: ceil_div(span.end, layer.tokens_per_block)]
        gathered = layer.gather(blocks, self.gathering.scratch, dtype).flatten(2, 3)
        return gathered[:, :, : span.end].unbind(0)


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """``[kv_heads, group, n, head_dim]`` over the first ``m - n`` keys and causally over the last
    n.
    """
    count, end = query.shape[2], keys.shape[2]
    if count == end:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    bias = causal_lower_right(count, end)
    return scaled_dot_product_attention(query, keys, values, bias, scale=scale)
