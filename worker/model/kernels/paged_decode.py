"""Attention of one query a sequence over its pages, the keys split among programs.

A program has one sequence, one kv head with all its query heads, and one of ``splits`` equal
runs of the visible keys. Where there are several, each leaves its result and the log2 of its
weights' total, and a second kernel joins them. The grid depends on the batch and on ``splits``
alone; a program without keys leaves -inf, one whose sequence is padding leaves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.kernels.ahead import wait_for_previous
from worker.model.kernels.scoring import capped, folded, token_offsets, visible


@triton.jit
def decode_part(  # noqa: PLR0913, PLR0915  # a kernel is one function
    query: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    slot_stride: tl.tensor,
    kind_stride: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table_row: tl.tensor,
    num_kv: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    if length == 0:
        return
    position = length - 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    first_tile = first // KEYS
    sink_tiles = tl.minimum((SINKS + KEYS - 1) // KEYS, first_tile)
    tiles = (length + KEYS - 1) // KEYS - first_tile + sink_tiles
    share = (tiles + SPLITS - 1) // SPLITS
    begin = part * share
    end = tl.minimum(begin + share, tiles)

    member = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    heads = head * GROUP + member
    is_head = member < GROUP
    row_mask = is_head[:, None] & (column < DIM)[None, :]
    place = sequence * (num_kv * GROUP) + heads
    if begin >= end:
        if SPLITS > 1:
            tl.store(totals + place * SPLITS + part, float("-inf"), mask=is_head)
        return
    q = tl.load(
        query + sequence * query_row + heads[:, None] * query_head + column[None, :],
        mask=row_mask,
        other=0.0,
    )
    own_table = table + sequence * table_row
    key_base = pages + head.to(tl.int64) * head_stride
    value_base = key_base + kind_stride
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + num_kv + head)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    found = tl.zeros([HEADS, WIDTH], tl.float32)
    for tile in tl.range(begin, end):
        number = tl.where(tile < sink_tiles, tile, tile - sink_tiles + first_tile)
        at = number * KEYS
        keys = at + tl.arange(0, KEYS)
        held = visible(position, keys, WINDOW, SINKS)
        offsets = token_offsets(
            own_table, at, keys, held, slot_stride, page_stride, token_stride,
            BLOCK_TOKENS, PAGE_TOKENS, KEYS,
        )  # fmt: skip
        rows = offsets[:, None] + column[None, :]
        mask = held[:, None] & (column < DIM)[None, :]
        k = tl.load(key_base + rows, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(value_base + rows, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = capped(scores, scale, softcap, CAPPED)
        scores = tl.where(held[None, :], scores, float("-inf"))
        weights, most, total, found = folded(scores, most, total, found)
        found = tl.dot(weights.to(q.dtype), v, found, input_precision="ieee")
    if SPLITS == 1:
        found = found * (value_scale / total)[:, None]
        target = out + place[:, None] * DIM + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=row_mask)
    else:
        found = found * (value_scale / total)[:, None]
        target = sums + (place[:, None] * SPLITS + part) * DIM + column[None, :]
        tl.store(target, found, mask=row_mask)
        tl.store(totals + place * SPLITS + part, most + tl.log2(total), mask=is_head)


@triton.jit
def join_parts(  # noqa: PLR0913
    sums: tl.tensor,
    totals: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    num_heads: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    if tl.load(lengths + sequence) == 0:
        return
    place = sequence * num_heads + head
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    total = tl.load(totals + place * SPLITS + part)
    weights = tl.exp2(total - tl.max(total, 0))
    mask = (weights > 0.0)[:, None] & (column < DIM)[None, :]
    rows = (place * SPLITS + part)[:, None] * DIM + column[None, :]
    found = tl.load(sums + rows, mask=mask, other=0.0)
    joined = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + place * DIM + column, joined.to(out.dtype.element_ty), mask=column < DIM)
