"""Index arithmetic of one forward step, done once a step and shared by all layers of a layer group.

A batch is one flat row of tokens: single-token sequences first, shortest visible context first,
then the longer ones. For each layer group this module derives where new keys and values are written
and which blocks each sequence attends over:

    decode    buckets of sequences of similar length: blocks [sequences x width] and one additive
    mask prefill   one sequence at a time: its own new keys alone when it starts at 0, else the
    blocks of its visible context

A token at position p sees positions q with p - window < q <= p, and the sinks q < sink_tokens.
numpy in, torch out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcache_core.arithmetic import ceil_div
from worker.model.errors import AttentionInputError

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

BUCKET_BYTES: Final = 2 << 20
"""Gathered keys and values of one decode bucket: about what stays in the cache of one core until it
is read again.
"""
SPLIT_BYTES: Final = 256 << 10
"""Padding that costs as much as one more attention call."""


class SequenceSlice(NamedTuple):
    """New tokens of one sequence.

    ``tokens`` int32 ``[n]`` go to positions ``start .. start + n``; keys and values before
    ``start`` are in the pages. ``block_tables`` has one int32 array a layer group: slot per block
    ordinal, -1 where stale. Its arrays are only read. Where ``feed`` is not negative the one token
    is the draw of that number in the step before, and ``tokens`` says nothing. ``owner`` names the
    sequence, and no other one of its runner; negative where nobody says.
    """

    tokens: Ints
    start: int
    block_tables: tuple[Ints, ...]
    wants_logits: bool
    feed: int = -1
    owner: int = -1

    @property
    def end(self) -> int:
        """Length of the sequence after this step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class GroupGeometry:
    """What the step needs to know about one layer group. ``block_bytes``: keys and values of one
    layer in one block.
    """

    tokens_per_block: int
    window: int | None
    sink_tokens: int
    num_slots: int
    block_bytes: int


@dataclass(frozen=True)
class DecodeBucket:
    """Sequences ``rows`` of the flat batch, one query each, over ``width`` blocks each.

    ``slots`` int64 ``[sequences * width]``. ``mask`` is additive ``[sequences, 1, 1, width *
    tokens_per_block]``; without one all sequences see exactly the keys ``first_key .. end_key``.
    """

    rows: slice
    slots: torch.Tensor
    width: int
    mask: torch.Tensor | None
    first_key: int
    end_key: int


@dataclass(frozen=True)
class PrefillSpan:
    """One sequence with several queries, rows ``rows`` of the flat batch.

    ``slots`` None: it attends over its own new keys only. Otherwise over keys ``first_key ..
    end_key`` of the gathered blocks. ``mask`` is additive ``[queries, keys]``; without one the span
    is plainly causal.
    """

    rows: slice
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    first_key: int
    end_key: int


@dataclass(frozen=True)
class GroupStep:
    """The step as seen by one layer group. Row t of the batch is written to ``write_slots[t],
    write_offsets[t]``.
    """

    write_slots: torch.Tensor
    write_offsets: torch.Tensor
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillSpan, ...]
    fresh_slots: tuple[int, ...]
    """Slots this step begins and does not fill: cleared first, so that whatever lay there cannot
    poison a masked read.
    """


def order(batch: Sequence[SequenceSlice]) -> list[int]:
    """Order of the sequences in the flat batch: decodes by length, then prefills."""
    return sorted(range(len(batch)), key=lambda i: (len(batch[i].tokens) > 1, batch[i].end, i))


def check_batch(batch: Sequence[SequenceSlice], geometries: Sequence[GroupGeometry]) -> None:
    """Raises:
    AttentionInputError: an empty slice, a wrong dtype or shape, too few blocks, or a slot outside
        the pool.
    """
    if not batch:
        raise AttentionInputError("expected at least one sequence in the batch, got none")
    for index, piece in enumerate(batch):
        where = f"sequence {index} of the batch"
        if piece.tokens.ndim != 1 or piece.tokens.dtype != np.int32 or not len(piece.tokens):
            raise AttentionInputError(
                f"{where}: expected tokens int32 [n >= 1], got {piece.tokens.dtype} "
                f"{list(piece.tokens.shape)}"
            )
        if piece.start < 0:
            raise AttentionInputError(f"{where}: expected start >= 0, got {piece.start}")
        if len(piece.block_tables) != len(geometries):
            raise AttentionInputError(
                f"{where}: expected {len(geometries)} block tables (one a layer group), got "
                f"{len(piece.block_tables)}"
            )
        for group, (table, geometry) in enumerate(zip(piece.block_tables, geometries, strict=True)):
            _check_table(f"{where}, layer group {group}", piece, table, geometry)


def _check_table(where: str, piece: SequenceSlice, table: Ints, geometry: GroupGeometry) -> None:
    if table.ndim != 1 or table.dtype != np.int32:
        raise AttentionInputError(
            f"{where}: expected a block table int32 [blocks], got {table.dtype} {list(table.shape)}"
        )
    needed = ceil_div(piece.end, geometry.tokens_per_block)
    if len(table) < needed:
        raise AttentionInputError(
            f"{where}: {piece.end} tokens need {needed} blocks, the block table has {len(table)}"
        )
    used = table[visible_blocks(piece.start, piece.end, geometry)]
    if used.min() < 0 or used.max() >= geometry.num_slots:
        raise AttentionInputError(
            f"{where}: expected slots in 0..{geometry.num_slots - 1} for every visible block, "
            f"got {used.tolist()}"
        )


def visible_blocks(start: int, end: int, geometry: GroupGeometry) -> Longs:
    """Ordinals of the blocks that queries at ``start .. end`` see or write, ascending."""
    size = geometry.tokens_per_block
    last = ceil_div(end, size)
    if geometry.window is None:
        return np.arange(last)
    first = max(0, start + 1 - geometry.window) // size
    sinks = min(ceil_div(geometry.sink_tokens, size), first)
    return np.concatenate((np.arange(sinks), np.arange(first, last)))


def plan_group(
    batch: Sequence[SequenceSlice],
    group: int,
    geometry: GroupGeometry,
    like: torch.Tensor,
) -> GroupStep:
    """Derive one group's step. ``batch`` is in flat order; ``like`` gives device and dtype of the
    masks.
    """
    size = geometry.tokens_per_block
    positions = np.concatenate([np.arange(piece.start, piece.end) for piece in batch])
    ordinals = positions // size
    slots = np.empty(len(positions), np.int64)
    row, decodes = 0, 0
    prefill: list[PrefillSpan] = []
    fresh: list[int] = []
    for piece in batch:
        table = piece.block_tables[group]
        end_row = row + len(piece.tokens)
        slots[row:end_row] = table[ordinals[row:end_row]]
        last = (piece.end - 1) // size
        if piece.start <= last * size and piece.end % size:
            fresh.append(int(table[last]))
        if len(piece.tokens) > 1:
            prefill.append(_prefill_span(piece, table, slice(row, end_row), geometry, like))
        else:
            decodes += 1
        row = end_row
    return GroupStep(
        write_slots=torch.from_numpy(slots).to(like.device),
        write_offsets=torch.from_numpy(positions - ordinals * size).to(like.device),
        decode=_decode_buckets(batch[:decodes], group, geometry, like),
        prefill=tuple(prefill),
        fresh_slots=tuple(fresh),
    )


def _prefill_span(
    piece: SequenceSlice, table: Ints, rows: slice, geometry: GroupGeometry, like: torch.Tensor
) -> PrefillSpan:
    queries = np.arange(piece.start, piece.end)
    window = geometry.window
    if piece.start == 0:
        mask = None
        if window is not None and piece.end > window:
            mask = _mask(queries[:, None], queries[None, :], geometry, like)
        return PrefillSpan(rows, None, mask, 0, piece.end)
    blocks = visible_blocks(piece.start, piece.end, geometry)
    keys = _key_positions(blocks, geometry.tokens_per_block)
    first_key = 0
    if window is not None and not geometry.sink_tokens:
        first_key = max(0, piece.start + 1 - window - int(keys[0]))
    end_key = len(keys) - (int(keys[-1]) + 1 - piece.end)
    visible = keys[first_key:end_key]
    return PrefillSpan(
        rows=rows,
        slots=torch.from_numpy(table[blocks].astype(np.int64)).to(like.device),
        mask=_mask(queries[:, None], visible[None, :], geometry, like),
        first_key=first_key,
        end_key=end_key,
    )


def _decode_buckets(
    batch: Sequence[SequenceSlice], group: int, geometry: GroupGeometry, like: torch.Tensor
) -> tuple[DecodeBucket, ...]:
    """Cut the decodes, ascending by length, into buckets, from the longest to the shortest."""
    blocks = [visible_blocks(piece.start, piece.end, geometry) for piece in batch]
    buckets: list[DecodeBucket] = []
    end = len(batch)
    while end:
        begin, width, padding = end - 1, len(blocks[end - 1]), 0
        while begin:
            wider = max(width, len(blocks[begin - 1]))
            more = padding + (wider - width) * (end - begin) + wider - len(blocks[begin - 1])
            full = (end - begin + 1) * wider * geometry.block_bytes > BUCKET_BYTES
            if full or more * geometry.block_bytes > SPLIT_BYTES:
                break
            begin, width, padding = begin - 1, wider, more
        rows = slice(begin, end)
        tables = [piece.block_tables[group] for piece in batch[rows]]
        ends = [piece.end for piece in batch[rows]]
        buckets.append(_decode_bucket(rows, ends, blocks[rows], tables, geometry, like))
        end = begin
    return tuple(buckets)


def _decode_bucket(
    rows: slice,
    ends: Sequence[int],
    blocks: Sequence[Longs],
    tables: Sequence[Ints],
    geometry: GroupGeometry,
    like: torch.Tensor,
) -> DecodeBucket:
    size, window = geometry.tokens_per_block, geometry.window
    width = max(map(len, blocks))
    slots = np.empty((len(blocks), width), np.int64)
    keys = np.full((len(blocks), width, size), np.iinfo(np.int64).max)
    for i, (own, table) in enumerate(zip(blocks, tables, strict=True)):
        slots[i, : len(own)] = table[own]
        slots[i, len(own) :] = table[own[0]]  # padding reads a page of its own sequence, masked
        keys[i, : len(own)] = _key_positions(own, size).reshape(-1, size)
    flat = keys.reshape(len(blocks), width * size)
    mask, first_key, end_key = None, 0, width * size
    if not geometry.sink_tokens and all(end == ends[0] for end in ends):
        first_visible = 0 if window is None else max(0, ends[0] - window)
        first_key = first_visible - int(flat[0, 0])
        end_key = ends[0] - int(flat[0, 0])
    else:
        queries = np.asarray(ends)[:, None] - 1
        mask = _mask(queries, flat, geometry, like)[:, None, None, :]
    device_slots = torch.from_numpy(slots.reshape(-1)).to(like.device)
    return DecodeBucket(rows, device_slots, width, mask, first_key, end_key)


def _key_positions(blocks: Longs, tokens_per_block: int) -> Longs:
    return (blocks[:, None] * tokens_per_block + np.arange(tokens_per_block)).reshape(-1)


def _mask(queries: Longs, keys: Longs, geometry: GroupGeometry, like: torch.Tensor) -> torch.Tensor:
    """Additive mask: 0 where a query sees a key, -inf elsewhere. Broadcasts its two arguments."""
    seen = keys <= queries
    if geometry.window is not None:
        near = keys > queries - geometry.window
        if geometry.sink_tokens:
            near |= keys < geometry.sink_tokens
        seen &= near
    mask = torch.zeros(seen.shape, dtype=like.dtype)
    return mask.masked_fill_(torch.from_numpy(~seen), float("-inf")).to(like.device)
