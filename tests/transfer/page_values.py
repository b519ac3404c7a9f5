"""What data bytes of a buffer should be: a function of layer, role, head, block, token, byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.spec import BufferRole, ElementType
from transfer.rank_info import PageBuffer, PageView

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
ROLES = [role.value for role in BufferRole]


def page_values(view: PageView, buffer: PageBuffer, ordinals: Sequence[int]) -> Bytes:
    """Data bytes of these blocks, ``[blocks, pages, page bytes]``."""
    seed = buffer.layer_id * len(ROLES) + ROLES.index(buffer.role)
    if view.sections:
        page = _section_values(view, seed)
        return np.broadcast_to(page, (len(ordinals), 1, view.page_bytes))
    heads = _numbers(view.first_head, view.num_heads)
    rows = max(view.tokens_per_page, 1)
    tokens = _numbers(0, view.pages_per_block * rows).reshape(view.pages_per_block, rows)
    row_bytes = _numbers(0, view.page_bytes // (view.num_heads * rows))
    values = _mixed(
        seed,
        np.array(ordinals, dtype=np.uint64)[:, None, None, None, None],
        heads[None, None, :, None, None],
        tokens[None, :, None, :, None],
        row_bytes,
    )
    return values.reshape(len(ordinals), view.pages_per_block, view.page_bytes)


def _section_values(view: PageView, seed: int) -> Bytes:
    bits = ElementType(view.element).bits
    shard = view.first_head // view.num_heads
    element_bytes = _numbers(0, max(bits // 8, 1))
    elements: Bytes = np.concatenate(
        [
            _mixed(seed, _numbers(index, 1), _numbers(shard * size, size)[:, None], element_bytes)
            for index, size in enumerate(view.sections)
        ]
    ).reshape(-1)
    if bits == 4:
        low, high = elements[0::2] & np.uint8(15), elements[1::2] & np.uint8(15)
        elements = np.bitwise_or(low, np.left_shift(high, np.uint8(4)))
    return elements


def _numbers(start: int, count: int) -> Numbers:
    return np.arange(start, start + count, dtype=np.uint64)


def _mixed(seed: int, *parts: Numbers) -> Bytes:
    """One byte for each combination, of which neighbours have nothing in common."""
    number: Numbers = np.array(seed, dtype=np.uint64)
    for part in parts:
        number = (number * np.uint64(1024) + part + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        number = np.bitwise_xor(number, np.right_shift(number, np.uint64(29)))
    mixed: Bytes = np.right_shift(number, np.uint64(40)).astype(np.uint8)
    return mixed
