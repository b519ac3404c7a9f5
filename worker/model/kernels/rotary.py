"""From the product of queries, keys and values to what attention reads: norm of each head, rotary
embedding, and new keys and values in their pages, in one pass.

A program has one token and some heads. Both halves of a rotated pair are read and written by the
same thread, so that the result can go where the input was. The result is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from worker.model.errors import AttentionInputError
from worker.model.kernels.ahead import ahead_of, wait_for_previous
from worker.model.kernels.page_write import on_float8_grid
from worker.model.page_numbers import FLOAT8_LIMIT, PageNumbers

HEADS: Final = 8
"""Heads of one program."""
WARPS: Final = 4


@dataclass(frozen=True)
class Rotary:
    """``cos`` and ``sin`` ``[tokens, rotary_dim]``, contiguous, each half of a row like the other.

    ``rotary_dim`` may be less than ``head_dim``: what follows is not rotated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadNorm:
    """``weight`` ``[query and key heads, head_dim]``, contiguous."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Places:
    """Where the keys and values of each token go: ``slots`` and ``offsets`` ``[tokens]``, integers.

    A negative slot is that of a row that pads a batch: its keys and values go nowhere.
    """

    slots: torch.Tensor
    offsets: torch.Tensor


@triton.jit
def _rotate_and_store(  # noqa: PLR0913
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm: tl.tensor,
    slots: tl.tensor,
    offsets: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    num_query: tl.tensor,
    num_kv: tl.tensor,
    eps: tl.tensor,
    slot_stride: tl.tensor,
    kind_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    HAS_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    wait_for_previous(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_heads = num_query + 2 * num_kv
    valid = head < num_heads
    turned = head < num_query + num_kv
    half: tl.constexpr = ROTATED // 2
    pair = tl.arange(0, HALF_BLOCK)
    rest = ROTATED + tl.arange(0, REST_BLOCK)
    in_pair = valid[:, None] & (pair < half)[None, :]
    in_rest = valid[:, None] & (rest < DIM)[None, :]
    source = heads + (token * num_heads + head)[:, None] * DIM
    low = tl.load(source + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
    high = tl.load(source + half + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
    tail = tl.load(source + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(tail * tail, 1)
        factor = tl.where(turned, 1.0 / tl.sqrt(squares / DIM + eps), 1.0)[:, None]
        scale = norm + head[:, None] * DIM
        known = turned[:, None]
        low *= factor * tl.load(scale + pair[None, :], mask=in_pair & known, other=1.0)
        high *= factor * tl.load(scale + half + pair[None, :], mask=in_pair & known, other=1.0)
        tail *= factor * tl.load(scale + rest[None, :], mask=in_rest & known, other=1.0)
    angle = token * ROTATED + pair
    c = tl.load(cos + angle, mask=pair < half, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    new_low = tl.where(turned[:, None], low * c - high * s, low)
    new_high = tl.where(turned[:, None], high * c + low * s, high)
    kind = heads.dtype.element_ty
    # Values stay as they are; what follows the rotated part does without a norm.
    changed = turned[:, None]
    tl.store(source + pair[None, :], new_low.to(kind), mask=in_pair & changed)
    tl.store(source + half + pair[None, :], new_high.to(kind), mask=in_pair & changed)
    if HAS_NORM:
        tl.store(source + rest[None, :], tail.to(kind), mask=in_rest & changed)
    slot = tl.load(slots + token).to(tl.int64)
    offset = tl.load(offsets + token).to(tl.int64)
    row = head - num_query
    # A vector of truth values: the interpreter of Triton 3.9 makes numbers of a scalar's.
    placed = (row * 0 + slot) >= 0
    stored = ((row >= 0) & valid & placed)[:, None]
    target = pages + slot * slot_stride + offset * token_stride
    target += ((row // num_kv) * kind_stride + (row % num_kv) * head_stride)[:, None]
    kept = pages.dtype.element_ty
    if SCALED:
        # Rounded to the model's type first, as rows are that another kernel stores.
        own = tl.load(scales + row, mask=(row >= 0) & valid, other=1.0)[:, None]
        new_low = on_float8_grid(new_low.to(kind).to(tl.float32) / own, LIMIT)
        new_high = on_float8_grid(new_high.to(kind).to(tl.float32) / own, LIMIT)
        tail = on_float8_grid(tail.to(kind).to(tl.float32) / own, LIMIT)
    tl.store(target + pair[None, :], new_low.to(kept), mask=in_pair & stored)
    tl.store(target + half + pair[None, :], new_high.to(kept), mask=in_pair & stored)
    tl.store(target + rest[None, :], tail.to(kept), mask=in_rest & stored)


def rotate_and_store(
    heads: torch.Tensor,
    rotary: Rotary,
    norm: HeadNorm | None,
    places: Places,
    pages: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Norm and rotate the queries and keys of ``heads`` in place; store keys and values.

    ``heads`` is ``[tokens, query heads + 2 * num_kv_heads, head_dim]``, contiguous: queries, keys,
    values. ``pages`` ``[num_slots, 2, num_kv_heads, tokens_per_block, head_dim]``, strided;
    ``scales`` as :class:`PageNumbers` says.

    Raises:
        AttentionInputError: shapes, strides or scales do not fit.
    """
    num_tokens, num_heads, dim = heads.shape
    num_kv = pages.shape[2]
    rotated = rotary.cos.shape[-1]
    _check(heads, rotary, places, pages)
    PageNumbers(pages, num_kv, scales)
    grid = (num_tokens, triton.cdiv(num_heads, HEADS))
    _rotate_and_store[grid](
        heads,
        rotary.cos,
        rotary.sin,
        heads if norm is None else norm.weight,
        places.slots,
        places.offsets,
        pages,
        scales,
        num_heads - 2 * num_kv,
        num_kv,
        0.0 if norm is None else norm.eps,
        *pages.stride()[:4],
        HAS_NORM=norm is not None,
        SCALED=scales is not None,
        LIMIT=FLOAT8_LIMIT,
        ROTATED=rotated,
        DIM=dim,
        HALF_BLOCK=triton.next_power_of_2(max(rotated // 2, 1)),
        REST_BLOCK=triton.next_power_of_2(max(dim - rotated, 1)),
        HEADS=HEADS,
        num_warps=WARPS,
        **ahead_of(heads.device),
    )


def _check(heads: torch.Tensor, rotary: Rotary, places: Places, pages: torch.Tensor) -> None:
    num_tokens, num_heads, dim = heads.shape
    if pages.shape[-1] != dim or pages.stride(-1) != 1 or pages.shape[2] * 2 >= num_heads:
        raise AttentionInputError(
            f"expected pages of vectors of {dim} numbers and fewer than {num_heads} / 2 kv heads, "
            f"got {list(pages.shape)} with strides {pages.stride()}"
        )
    rotated = rotary.cos.shape[-1]
    angles = (num_tokens, rotated)
    if rotary.cos.shape != angles or rotary.sin.shape != angles or rotated > dim or rotated % 2:
        raise AttentionInputError(
            f"expected cos and sin [{num_tokens}, even number up to {dim}], "
            f"got {list(rotary.cos.shape)} and {list(rotary.sin.shape)}"
        )
    if len(places.slots) != num_tokens or len(places.offsets) != num_tokens:
        raise AttentionInputError(
            f"expected a place for each of {num_tokens} tokens, got {len(places.slots)} slots "
            f"and {len(places.offsets)} offsets"
        )
    for name, part in (("heads", heads), ("cos", rotary.cos), ("sin", rotary.sin)):
        if not part.is_contiguous():
            raise AttentionInputError(f"expected {name} contiguous, got strides {part.stride()}")
