"""Attention of many new tokens over pages, for devices with warpgroup products (capability 9.0).

A program has one query head and one tile of 128 queries of one sequence, as in ``paged_prefill``.
One warp copies tiles of 128 keys and of their values to shared memory, a box of each page at a
time; two groups of four warps have 64 queries each. A group starts the product of a tile's scores
together with that of the tile before and its values, so tensor cores work while it is at its
softmax (the schedule of FlashAttention-3, arXiv:2407.08608). ``HopperPages`` says what it can read.

Invariant: barriers ``full`` are passed when a copy has landed, ``empty`` when both groups have read
a tile; a parity a tile apart tells one turn from the next. Rows behind a sequence's end take part
in products with weight zero, so their values are set to zero: what lies there may be no number.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from worker.model.kernels.gluon_names import load_box, wait_for_group
from worker.model.step_metadata import TILE_TOKENS

QUERIES = gl.constexpr(TILE_TOKENS)
KEYS = gl.constexpr(128)
GROUPS = gl.constexpr(2)
STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, in shared memory: 160 KB with the queries at width 128."""


@gluon.jit
def _load_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    pages, table, first_key, last_block, first_row, rows_slot, rows_page, full, tile,
    DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Start the copy of keys (or values) ``first_key ..``; behind the last block, it again."""
    mbarrier.expect(full, KEYS * DIM * 2)
    for box in gl.static_range(KEYS // BOX):
        at = first_key + box * BOX
        slot = gl.load(table + gl.minimum(at // BLOCK_TOKENS, last_block))
        inside = at % BLOCK_TOKENS
        row = first_row + slot * rows_slot
        row += inside // PAGE_TOKENS * rows_page + inside % PAGE_TOKENS
        load_box(pages, [row, 0], full, tile.slice(box * BOX, BOX))


@gluon.jit
def _load(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    pages, queries, table, query_row, query_column, tiles, last_block, key_row, value_row,
    rows_slot, rows_page, buffers,
    DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """What the copying warp does."""
    q_tiles, q_full, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = buffers
    ROWS: gl.constexpr = QUERIES // GROUPS
    for part in gl.static_range(GROUPS):
        full = q_full.index(part)
        mbarrier.expect(full, ROWS * DIM * 2)
        load_box(queries, [query_row + part * ROWS, query_column], full, q_tiles.index(part))
    for tile in range(tiles):
        stage = tile % STAGES
        # A fresh barrier lets waits for the turn before its first one through.
        before = (tile // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), before)
        _load_tile(
            pages, table, tile * KEYS, last_block, key_row, rows_slot, rows_page,
            k_full.index(stage), k_tiles.index(stage), DIM, BLOCK_TOKENS, PAGE_TOKENS, BOX,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), before)
        _load_tile(
            pages, table, tile * KEYS, last_block, value_row, rows_slot, rows_page,
            v_full.index(stage), v_tiles.index(stage), DIM, BLOCK_TOKENS, PAGE_TOKENS, BOX,
        )  # fmt: skip


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    out, out_row, query_row, query_column, first_query, tiles, length, scale, buffers,
    PART: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does with its half of the queries."""
    q_tiles, q_full, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = buffers
    ROWS: gl.constexpr = QUERIES // GROUPS
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    row_of_sum: gl.constexpr = gl.SliceLayout(1, summed)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_tiles.dtype

    first = first_query + PART * ROWS
    query = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scored))
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scored))
    masked_from = (first + 1) // KEYS
    q = q_tiles.index(PART)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, scored)
    found = gl.zeros([ROWS, DIM], gl.float32, summed)

    # Every query sees key 0, so no maximum is minus infinity behind the first tile.
    mbarrier.wait(q_full.index(PART), 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_tiles.index(0).permute((1, 0))
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    wait_for_group()
    mbarrier.arrive(k_empty.index(0))
    if masked_from <= 0:
        scores = gl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    most = gl.max(scores, 1) * scale
    weights = gl.exp2(scores * scale - most[:, None])
    total = gl.sum(weights, 1)
    held = gl.convert_layout(weights.to(dtype), operand)
    for tile in range(1, tiles):
        stage = tile % STAGES
        last = (tile - 1) % STAGES
        mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
        k = k_tiles.index(stage).permute((1, 0))
        scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), (tile - 1) // STAGES & 1)
        found = warpgroup_mma(held, v_tiles.index(last), found, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        wait_for_group()
        mbarrier.arrive(k_empty.index(stage))
        if tile >= masked_from:
            seen = (tile * KEYS + key)[None, :] <= query[:, None]
            scores = gl.where(seen, scores, float("-inf"))
        higher = gl.maximum(most, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - higher[:, None])
        shrink = gl.exp2(most - higher)
        total = total * shrink + gl.sum(weights, 1)
        most = higher
        found = warpgroup_mma_wait(0, [found])
        wait_for_group()
        mbarrier.arrive(v_empty.index(last))
        held = gl.convert_layout(weights.to(dtype), operand)
        found = found * gl.convert_layout(shrink, row_of_sum)[:, None]
    last = tiles - 1
    v = v_tiles.index(last % STAGES)
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    if tiles * KEYS > length:
        # Both groups write the same.
        key_of_value = last * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, plain))
        v.store(gl.where((key_of_value < length)[:, None], v.load(plain), 0.0).to(dtype))
        fence_async_shared()
        wait_for_group()
    found = warpgroup_mma(held, v, found, is_async=True)
    found = warpgroup_mma_wait(0, [found])
    found = found / gl.convert_layout(total, row_of_sum)[:, None]
    answer = gl.convert_layout(found.to(dtype), plain)
    member = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    column = query_column + gl.arange(0, DIM, layout=gl.SliceLayout(0, plain))
    rows = (query_row + PART * ROWS + member).to(gl.int64)[:, None] * out_row
    gl.store(out + rows + column[None, :], answer, mask=(first + member < length)[:, None])


@gluon.jit
def hopper_prefill_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    pages, queries, table, starts, lengths, first_rows, tile_sequences, tile_offsets, out,
    scale, rows_slot, rows_kind, rows_page, rows_head, table_row, out_row,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """``pages``: all rows ``[.., DIM]``, in boxes of BOX; ``queries``: ``[rows, heads * DIM]``, in
    boxes of half a tile; ``scale`` in units of log2, positive. Needs 4 warps.
    """
    head = gl.program_id(0)
    tile = gl.program_id(1)
    sequence = gl.load(tile_sequences + tile)
    offset = gl.load(tile_offsets + tile)
    length = gl.load(lengths + sequence)
    query_row = gl.load(first_rows + sequence) + offset
    first_query = gl.load(starts + sequence) + offset
    # A tile that pads a step has one too: everybody waits for something.
    tiles = gl.maximum(gl.cdiv(gl.minimum(first_query + QUERIES, length), KEYS), 1)
    last_block = gl.maximum(length - 1, 0) // BLOCK_TOKENS
    own_table = table + sequence.to(gl.int64) * table_row
    key_row = head // GROUP * rows_head
    dtype: gl.constexpr = pages.dtype
    ROWS: gl.constexpr = QUERIES // GROUPS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, DIM], swizzled)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], swizzled)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for part in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()
    buffers = (q_tiles, q_full, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty)
    column = head * DIM
    # 240 registers a thread for either group: 216 are used, and 24 are enough for copies.
    gl.warp_specialize(
        [
            (_attend, (
                out, out_row, query_row, column, first_query, tiles, length, scale, buffers, 0, DIM,
            )),
            (_attend, (
                out, out_row, query_row, column, first_query, tiles, length, scale, buffers, 1, DIM,
            )),
            (_load, (
                pages, queries, own_table, query_row, column, tiles, last_block, key_row,
                key_row + rows_kind, rows_slot, rows_page, buffers,
                DIM, BLOCK_TOKENS, PAGE_TOKENS, BOX,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
