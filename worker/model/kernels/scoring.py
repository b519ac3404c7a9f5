"""What the attention kernels share: where a key lies, which queries see it, and the running softmax
over tiles of keys.

Scores are kept in units of log2, so that a weight is one exp2. ``most`` is a row's largest score so
far, ``total`` the sum of its weights relative to it.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634


@triton.jit
def token_offsets(  # noqa: PLR0913
    table: tl.tensor,
    first: tl.tensor,
    positions: tl.tensor,
    held: tl.tensor,
    slot_stride: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Elements from the pages' base to each token of a tile that begins at ``first``: int64.

    ``table`` is the sequence's row of the block table; only entries of ``held`` tokens are used.
    """
    if BLOCK_TOKENS % KEYS == 0:
        # The whole tile lies in one block, which the caller has at least one held token of.
        slot = tl.load(table + first // BLOCK_TOKENS).to(tl.int64)
        begin = slot * slot_stride
        inside = first % BLOCK_TOKENS + (positions - first)
    else:
        slots = tl.load(table + positions // BLOCK_TOKENS, mask=held, other=0).to(tl.int64)
        begin = slots * slot_stride
        inside = positions % BLOCK_TOKENS
    if PAGE_TOKENS == BLOCK_TOKENS:
        return begin + inside * token_stride
    else:
        return begin + inside // PAGE_TOKENS * page_stride + inside % PAGE_TOKENS * token_stride


@triton.jit
def capped(scores: tl.tensor, scale: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products to scores in units of log2; ``scale`` includes log2(e) where there is no cap."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), finite for every x; 2.885... is 2 log2(e).
        grown = tl.exp2(scores * (scale / softcap) * 2.8853900817779268)
        return (1.0 - 2.0 / (grown + 1.0)) * (softcap * 1.4426950408889634)
    else:
        return scores * scale


@triton.jit
def visible(
    queries: tl.tensor,
    keys: tl.tensor,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
) -> tl.tensor:
    """Whether queries at positions ``[m, 1]`` see keys at ``[1, n]``. No window: WINDOW is 0."""
    seen = keys <= queries
    if WINDOW > 0:
        near = keys > queries - WINDOW
        if SINKS > 0:
            near = near | (keys < SINKS)
        seen = seen & near
    return seen


@triton.jit
def folded(scores, most, total, sums):  # type: ignore[no-untyped-def]
    """One more tile of scores ``[m, n]``: its weights, and the running state made relative to the
    new maximum. Rows that have seen nothing stay at -inf without becoming NaN.
    """
    higher = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    return weights, higher, total, sums * shrink[:, None]
