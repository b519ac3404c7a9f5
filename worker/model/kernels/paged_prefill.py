"""Attention of many new tokens a sequence over its pages, cached prefix and new keys alike.

A program has one query head and one tile of consecutive queries of one sequence. Tiles of many
sequences are one launch, those that see most first. Keys that every query of a tile sees are read
without a mask; the masked ones are the diagonal, and all of them where there is a window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.kernels.scoring import capped, folded, token_offsets, visible


@triton.jit
def _attended(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    begin, end, q, queries, most, total, found, key_base, value_base, table, stop, scale, softcap,
    slot_stride, page_stride, token_stride,
    DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys ``begin .. end`` (tile numbers) into the running softmax."""
    column = tl.arange(0, WIDTH)
    for tile in tl.range(begin, end):
        at = tile * KEYS
        keys = at + tl.arange(0, KEYS)
        held = keys < stop
        if WINDOW > 0:
            # Below it some blocks are stale.
            near = keys > tl.min(queries, 0) - WINDOW
            if SINKS > 0:
                near = near | (keys < SINKS)
            held = held & near
        offsets = token_offsets(
            table, at, keys, held, slot_stride, page_stride, token_stride,
            BLOCK_TOKENS, PAGE_TOKENS, KEYS,
        )  # fmt: skip
        rows = offsets[:, None] + column[None, :]
        if MASKED:
            mask = held[:, None] & (column < DIM)[None, :]
            k = tl.load(key_base + rows, mask=mask, other=0.0).to(q.dtype)
        elif WIDTH > DIM:
            mask = tl.full([KEYS, 1], 1, tl.int1) & (column < DIM)[None, :]
            k = tl.load(key_base + rows, mask=mask, other=0.0).to(q.dtype)
        else:
            k = tl.load(key_base + rows).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = capped(scores, scale, softcap, CAPPED)
        if MASKED:
            seen = visible(queries[:, None], keys[None, :], WINDOW, SINKS)
            scores = tl.where(seen, scores, float("-inf"))
        weights, most, total, found = folded(scores, most, total, found)
        if MASKED:
            mask = held[:, None] & (column < DIM)[None, :]
            v = tl.load(value_base + rows, mask=mask, other=0.0).to(q.dtype)
        elif WIDTH > DIM:
            mask = tl.full([KEYS, 1], 1, tl.int1) & (column < DIM)[None, :]
            v = tl.load(value_base + rows, mask=mask, other=0.0).to(q.dtype)
        else:
            v = tl.load(value_base + rows).to(q.dtype)
        found = tl.dot(weights.to(q.dtype), v, found, input_precision="ieee")
    return most, total, found


@triton.jit
def prefill_tile(  # noqa: PLR0913
    query: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    first_rows: tl.tensor,
    tile_sequences: tl.tensor,
    tile_offsets: tl.tensor,
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
    CUTS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    tile = tl.program_id(1) // CUTS
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    # The last cut of a tile sees most.
    offset = tl.load(tile_offsets + tile) + (CUTS - 1 - tl.program_id(1) % CUTS) * QUERIES
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)
    if start + offset >= length:
        return
    member = tl.arange(0, QUERIES)
    column = tl.arange(0, WIDTH)
    queries = start + offset + member
    first_row = (tl.load(first_rows + sequence) + offset).to(tl.int64)
    row_mask = (queries < length)[:, None] & (column < DIM)[None, :]
    rows = (first_row + member)[:, None]
    q = tl.load(
        query + rows * query_row + head * query_head + column[None, :], mask=row_mask, other=0.0
    )
    kv_head = head // GROUP
    own_table = table + sequence * table_row
    key_base = pages + kv_head.to(tl.int64) * head_stride
    value_base = key_base + kind_stride
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(scales + kv_head)
        value_scale = tl.load(scales + num_kv + kv_head)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    stop = tl.minimum(start + offset + QUERIES, length)
    last_tile = (stop + KEYS - 1) // KEYS
    masked_from = (start + offset + 1) // KEYS
    if WINDOW > 0:
        masked_from = tl.maximum(start + offset + 1 - WINDOW, 0) // KEYS
        if SINKS > 0:
            sink_tiles = tl.minimum((SINKS + KEYS - 1) // KEYS, masked_from)
            most, total, found = _attended(
                0, sink_tiles, q, queries, most, total, found, key_base, value_base, own_table,
                stop, scale, softcap, slot_stride, page_stride, token_stride,
                DIM, BLOCK_TOKENS, PAGE_TOKENS, WINDOW, SINKS, CAPPED,
                MASKED=True, WIDTH=WIDTH, KEYS=KEYS,
            )  # fmt: skip
    else:
        most, total, found = _attended(
            0, masked_from, q, queries, most, total, found, key_base, value_base, own_table,
            stop, scale, softcap, slot_stride, page_stride, token_stride,
            DIM, BLOCK_TOKENS, PAGE_TOKENS, WINDOW, SINKS, CAPPED,
            MASKED=False, WIDTH=WIDTH, KEYS=KEYS,
        )  # fmt: skip
    most, total, found = _attended(
        masked_from, last_tile, q, queries, most, total, found, key_base, value_base, own_table,
        stop, scale, softcap, slot_stride, page_stride, token_stride,
        DIM, BLOCK_TOKENS, PAGE_TOKENS, WINDOW, SINKS, CAPPED,
        MASKED=True, WIDTH=WIDTH, KEYS=KEYS,
    )  # fmt: skip
    # A row that only fills the tile may have seen nothing.
    found = found * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    target = out + (rows * (num_kv * GROUP) + head) * DIM + column[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=row_mask)
