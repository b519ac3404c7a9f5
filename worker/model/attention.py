"""Paged attention behind transformers' attention interface: write the new keys and values, attend
over the pages.

The runner registers this function once, loads models with ``attn_implementation=PAGED`` and passes
``paged=AttentionStep`` to the forward call; transformers hands extra keyword arguments through to
every layer. All sequences lie in one row ``[1, T]``, no mask is made by transformers. One layer
costs one write of keys, one of values, and per decode bucket or prefill span one gather into a
reused buffer and one scaled_dot_product_attention.

Query heads of one kv head are rows of the same product (decode) or heads of a batch of kv heads
(prefill), so that keys and values are never repeated in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from typing_extensions import override

from worker.model.errors import AttentionInputError
from worker.model.kept_keys import KeptBucket
from worker.model.page_numbers import PageNumbers
from worker.model.step import DecodeBucket, GroupStep, PrefillSpan

Pair = tuple[torch.Tensor, ...]
"""Keys and values."""

PAGED: Final = "pageferry_paged"
MASKED_QUERY_BLOCK: Final = 64
"""Queries that CUDA's memory-efficient attention works on together."""


class Scratch:
    """Reused buffers for gathered pages, one a type: a fresh allocation a layer costs more in page
    faults than the copy itself.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor, valid until the next call for its type."""
        elements = math.prod(shape)
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < elements:
            buffer = self._buffers[dtype] = self._like.new_empty(elements, dtype=dtype)
        return buffer[:elements].view(*shape)


class LayerPages:
    """One layer's pages, as views made once.

    ``pages`` is ``[num_slots, 2, num_kv_heads, tokens_per_block, head_dim]``, strided, no copy;
    ``scales`` as :class:`PageNumbers` says.
    """

    def __init__(self, pages: torch.Tensor, group: int, scales: torch.Tensor | None = None) -> None:
        """Raises AttentionInputError: shape, type or scales do not fit."""
        if pages.ndim != 5 or pages.shape[1] != 2:
            raise AttentionInputError(
                "expected pages [num_slots, 2, num_kv_heads, tokens_per_block, head_dim], "
                f"got {list(pages.shape)}"
            )
        self.group = group
        self.pages = pages
        _, _, self.num_kv_heads, self.tokens_per_block, self.head_dim = pages.shape
        self.numbers = PageNumbers(pages, self.num_kv_heads, scales)
        self.by_token = pages.permute(0, 3, 1, 2, 4)
        """``[num_slots, tokens_per_block, 2, num_kv_heads, head_dim]``"""
        self.by_head = pages.permute(1, 2, 0, 3, 4)
        """``[2, num_kv_heads, num_slots, tokens_per_block, head_dim]``"""

    def write(self, step: GroupStep, rows: torch.Tensor) -> None:
        """Put the batch's new rows, as pages hold them, in their places: keys and values ``[T, 2,
        num_kv_heads, head_dim]``.
        """
        self.by_token.index_put_((step.write_slots, step.write_offsets), rows)

    def gather(self, slots: torch.Tensor, scratch: Scratch, dtype: torch.dtype) -> torch.Tensor:
        """What the pages of ``slots`` hold, in ``dtype``: ``[2, num_kv_heads, len(slots),
        tokens_per_block, head_dim]``.
        """
        shape = (2, self.num_kv_heads, len(slots), self.tokens_per_block, self.head_dim)
        taken = scratch.take(shape, self.numbers.dtype)
        torch.index_select(self.by_head, 2, slots, out=taken)
        if self.numbers.scales is None:
            return taken
        seen = scratch.take(shape, dtype).copy_(taken)
        return seen.mul_(self.numbers.scales[:, :, None, None, None])


@dataclass(frozen=True)
class Scoring:
    """How scores become weights: ``softmax(softcap * tanh(q k * scale / softcap))``; no softcap
    leaves out the tanh. ``sinks`` ``[heads]`` are scores that take their share of a head's weights
    and have no value.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether fused kernels compute it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Target:
    """Where a layer stores the keys and values of a batch: row t in ``slots[t], offsets[t]`` of
    ``pages`` ``[num_slots, 2, num_kv_heads, tokens_per_block, head_dim]``; divided by ``scales``
    ``[2, num_kv_heads]`` where there are any.
    """

    pages: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    scales: torch.Tensor | None


class AttentionStep(Protocol):
    """One step of one attention backend, as a model's layers see it."""

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new rows of layer ``index`` and attend: see :func:`attend`."""
        ...

    def target(self, index: int) -> Target:
        """Where the new rows of layer ``index`` go, for a kernel that stores them itself."""
        ...

    def attend_stored(
        self, index: int, query: torch.Tensor, key_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """:meth:`attend` once the rows are in the pages."""
        ...

    def of_drawn(self) -> AttentionStep:
        """The same step for a layer behind which only rows with wanted logits matter: what is found
        for others may be anything.
        """
        ...


@dataclass(frozen=True)
class StepContext(AttentionStep):
    """Everything the layers of one step of the ``torch`` backend share."""

    layers: tuple[LayerPages, ...]
    """By the model's layer index."""
    groups: tuple[GroupStep, ...]
    num_rows: int
    scratch: Scratch
    kept: tuple[tuple[KeptBucket | None, ...], ...]
    """Of each group's decode buckets."""

    @override
    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attend(self, index, query, key_value, scale, softcap, sinks)

    @override
    def target(self, index: int) -> Target:
        layer = self.layers[index]
        step = self.groups[layer.group]
        return Target(layer.pages, step.write_slots, step.write_offsets, layer.numbers.scales)

    @override
    def attend_stored(
        self, index: int, query: torch.Tensor, key_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return attend_stored(self, index, query, key_value, Scoring(scale))

    @override
    def of_drawn(self) -> StepContext:
        return self


def attend(
    context: StepContext,
    index: int,
    query: torch.Tensor,
    key_value: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the new rows of layer ``index`` and attend.

    ``query`` is ``[T, heads, head_dim]``, ``key_value`` ``[T, 2, num_kv_heads, head_dim]``; both
    may be strided. Returns ``[T, heads, head_dim]``, contiguous.

    Raises:
        AttentionInputError: device, dtype, layout or length of the arguments do not fit the pages.
    """
    layer = context.layers[index]
    check_rows(layer, context.num_rows, query, key_value)
    stored = layer.numbers.stored(key_value)
    layer.write(context.groups[layer.group], stored)
    return _attend(context, index, query, stored, Scoring(scale, softcap, sinks))


def attend_stored(
    context: StepContext,
    index: int,
    query: torch.Tensor,
    key_value: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """The second half of :func:`attend`, for rows that are in the pages."""
    layer = context.layers[index]
    check_rows(layer, context.num_rows, query, key_value)
    return _attend(context, index, query, layer.numbers.stored(key_value), scoring)


def _attend(
    context: StepContext,
    index: int,
    query: torch.Tensor,
    stored: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """``stored``: the step's rows as pages hold them, ``[T, 2, num_kv_heads, head_dim]``."""
    layer = context.layers[index]
    step = context.groups[layer.group]
    # [T, kv_heads, heads per kv head, head_dim]
    queries = query.unflatten(1, (layer.num_kv_heads, -1))
    output = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    for bucket, kept in zip(step.decode, context.kept[layer.group], strict=True):
        if kept is None:
            gathered = layer.gather(bucket.slots, context.scratch, query.dtype)
        else:
            gathered = _kept(context, index, (bucket, kept), stored, query.dtype)
        output[bucket.rows] = _decode(bucket, queries[bucket.rows], gathered, scoring)
    for span in step.prefill:
        if span.slots is None:
            own = layer.numbers.seen(stored[span.rows], query.dtype)
            seen: Pair = own.permute(1, 2, 0, 3).unbind(0)
        else:
            gathered = layer.gather(span.slots, context.scratch, query.dtype).flatten(2, 3)
            seen = gathered[:, :, span.first_key : span.end_key].unbind(0)
        output[span.rows] = _prefill(span, queries[span.rows], seen, scoring)
    return output.flatten(1, 2)


def _kept(
    context: StepContext,
    index: int,
    of: tuple[DecodeBucket, KeptBucket],
    stored: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the pages of a bucket hold, from memory that is kept of them."""
    (bucket, kept), layer = of, context.layers[index]
    keys = bucket.width * layer.tokens_per_block
    shape = (2, layer.num_kv_heads, len(kept.starts), keys, layer.head_dim)

    def gather(memory: torch.Tensor) -> None:
        memory.copy_(layer.gather(bucket.slots, context.scratch, dtype).view(shape))

    return kept.seen(index, layer.numbers.seen(stored[bucket.rows], dtype), shape, gather)


def paged_attention(  # noqa: PLR0913  # transformers fixes the signature
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: AttentionStep,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' sense: ``[1, heads, T, head_dim]`` in, ``[1, T, heads,
    head_dim]`` out. ``s_aux`` are the heads' sinks. What else a family may ask for is looked for
    when its model is loaded (:mod:`worker.model.inspection`).

    Raises:
        AttentionInputError: see :func:`attend`.
    """
    if attention_mask is not None:
        raise AttentionInputError("expected no attention mask: visibility follows from the step")
    if key.shape != value.shape:
        raise AttentionInputError(
            f"expected key and value rows for the same tokens and heads, "
            f"got {list(key.shape)} and {list(value.shape)}"
        )
    index: int = module.layer_idx  # type: ignore[assignment]  # every attention module has one
    rows = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    found = paged.attend(index, query[0].transpose(0, 1), rows, scale, softcap, s_aux)
    return found.unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention)


def check_rows(
    layer: LayerPages, num_rows: int, query: torch.Tensor, key_value: torch.Tensor
) -> None:
    """Raises:
    AttentionInputError: see :func:`attend`.
    """
    expected = (num_rows, 2, layer.num_kv_heads, layer.head_dim)
    if key_value.shape != expected:
        raise AttentionInputError(
            f"expected key and value rows for every token of the step, {list(expected)}, "
            f"got {list(key_value.shape)}"
        )
    heads = query.shape[1]
    if query.shape != (num_rows, heads, layer.head_dim) or heads % layer.num_kv_heads:
        raise AttentionInputError(
            f"expected query [{num_rows}, multiple of {layer.num_kv_heads}, {layer.head_dim}], "
            f"got {list(query.shape)}"
        )
    for name, rows in (("query", query), ("key and value", key_value)):
        layer.numbers.check(name, rows, query.dtype)


def _decode(
    bucket: DecodeBucket, queries: torch.Tensor, gathered: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """``queries`` ``[sequences, kv_heads, heads per kv head, head_dim]``; the result has the same
    shape.
    """
    sequences, kv_heads, group, head_dim = queries.shape
    keys, values = (
        gathered.view(2, kv_heads, sequences, -1, head_dim)
        .transpose(1, 2)[:, :, :, bucket.first_key : bucket.end_key]
        .unbind(0)
    )
    mask = None if bucket.mask is None else bucket.mask.expand(-1, -1, group, -1)
    if not scoring.plain:
        sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, group, 1)
        return _attend_in_steps(queries, keys, values, mask, replace(scoring, sinks=sinks))
    if mask is None:
        return scaled_dot_product_attention(queries, keys, values, scale=scoring.scale)
    return _attend_masked(queries, keys, values, mask, scoring)


def _prefill(
    span: PrefillSpan,
    queries: torch.Tensor,
    seen: Pair,
    scoring: Scoring,
) -> torch.Tensor:
    """``queries`` ``[n, kv_heads, heads per kv head, head_dim]``, keys and values ``[kv_heads, m,
    head_dim]``.
    """
    group = queries.shape[2]
    keys, values = (rows.unsqueeze(1).expand(-1, group, -1, -1) for rows in seen)
    by_head = queries.permute(1, 2, 0, 3)
    mask, causal = span.mask, span.mask is None
    if not scoring.plain:
        if causal:
            square = queries.new_full((len(queries), len(queries)), float("-inf"))
            mask = square.triu_(1)
        sinks = None if scoring.sinks is None else scoring.sinks.view(-1, group, 1, 1)
        found = _attend_in_steps(by_head, keys, values, mask, replace(scoring, sinks=sinks))
    elif mask is None:
        found = scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=scoring.scale
        )
    else:
        found = _attend_masked(by_head, keys, values, mask, scoring)
    return found.permute(2, 0, 1, 3)


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of ``[..., n, head_dim]`` under an additive mask whose last two axes are ``[n or 1,
    keys]``.

    CUDA's memory-efficient kernel gives a wrong result for a query that is alone in the last block
    of 64 (seen in torch 2.11, float32, with query and key strided as here; not with contiguous
    ones). So it gets company, on every device alike.
    """
    rows = query.shape[-2]
    if rows % MASKED_QUERY_BLOCK != 1:
        return scaled_dot_product_attention(query, key, value, mask, scale=scoring.scale)
    query = torch.cat((query, query[..., -1:, :]), -2)
    if mask.shape[-2] == rows:
        mask = torch.cat((mask, mask[..., -1:, :]), -2)
    found = scaled_dot_product_attention(query, key, value, mask, scale=scoring.scale)
    return found[..., :rows, :]


def _attend_in_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention with what the fused kernels do not have. Sinks have the scores' axes."""
    scores = query @ key.transpose(2, 3) * scoring.scale
    cap = scoring.softcap
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    sinks = scoring.sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, sinks), -1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(value.dtype) @ value
