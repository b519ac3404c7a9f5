"""New keys and values into their pages: one program a row. A negative slot is a padding row, whose
keys and values go nowhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def on_float8_grid(numbers: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """float32 numbers to the nearest that float8_e4m3fn holds, halves to even, clamped to it.

    The conversion itself is exact then: Triton's interpreter, unlike a GPU, cannot round in it.
    """
    numbers = tl.maximum(numbers, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    numbers = tl.minimum(numbers, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    power = (numbers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Three bits after the leading one, none below 2 ** -9. Adding 1.5 * 2 ** 23 units rounds.
    large = tl.maximum(power, 0.015625) * (0.125 * 12582912.0)
    return (numbers + large) - large


@triton.jit
def write_rows(  # noqa: PLR0913
    rows: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    offsets: tl.tensor,
    row_stride: tl.tensor,
    row_kind: tl.tensor,
    row_head: tl.tensor,
    slot_stride: tl.tensor,
    kind_stride: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    offset = tl.load(offsets + row)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    mask = (head < NUM_KV)[:, None] & (column < DIM)[None, :]
    source = rows + row * row_stride + kind * row_kind + head[:, None] * row_head + column[None, :]
    found = tl.load(source, mask=mask, other=0.0)
    if SCALED:
        own = tl.load(scales + kind * NUM_KV + head, mask=head < NUM_KV, other=1.0)
        found = on_float8_grid(found.to(tl.float32) / own[:, None], LIMIT)
    begin = slot * slot_stride + kind.to(tl.int64) * kind_stride
    begin += offset // PAGE_TOKENS * page_stride + offset % PAGE_TOKENS * token_stride
    target = pages + begin + head.to(tl.int64)[:, None] * head_stride + column[None, :]
    tl.store(target, found.to(pages.dtype.element_ty), mask=mask)
