"""What is measured: layers and batches, and the work that each must do at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from worker.model.page_numbers import FLOAT8

BRAIN: Final = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """``lengths``: tokens in the pages and new tokens of each sequence. ``page``: tokens of a page
    where blocks hold several.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 64
    page: int | None = None
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    dtype: torch.dtype = BRAIN
    page_dtype: torch.dtype = BRAIN

    @property
    def is_decode(self) -> bool:
        """Whether memory bounds it, rather than products."""
        return all(count == 1 for _, count in self.lengths)

    @property
    def is_plain(self) -> bool:
        """Whether one call of torch's attention computes it: equal lengths, no prefix or one
        query, and nothing that changes scores or what is seen.
        """
        starts = {start for start, _ in self.lengths}
        return (
            len(set(self.lengths)) == 1
            and (self.is_decode or starts == {0})
            and self.window is None
            and self.softcap is None
            and self.page_dtype == self.dtype
        )

    def seen(self, position: int) -> int:
        """Keys that a query sees."""
        if self.window is None or position < self.window:
            return position + 1
        return self.window + min(self.sinks, position + 1 - self.window)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the decodes read."""
        tokens = sum(self.seen(start) for start, count in self.lengths if count == 1)
        return tokens * 2 * self.kv_heads * self.dim * self.page_dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of both products, over visible keys alone."""
        pairs = sum(
            self.seen(position)
            for start, count in self.lengths
            for position in range(start, start + count)
        )
        return 4 * pairs * self.heads * self.dim


def _many(count: int, start: int, new: int = 1) -> tuple[tuple[int, int], ...]:
    return ((start, new),) * count


CASES: Final[Sequence[Case]] = (
    Case(name="decode 1 x 4k", lengths=_many(1, 4095)),
    Case(name="decode 1 x 32k", lengths=_many(1, 32767)),
    Case(name="decode 8 x 4k", lengths=_many(8, 4095)),
    Case(name="decode 64 x 4k", lengths=_many(64, 4095)),
    Case(name="decode 64 x 4k, pages of 32", lengths=_many(64, 4095), page=32),
    Case(name="decode 64 x 4k, blocks of 32", lengths=_many(64, 4095), block=32),
    Case(name="decode 64 x 4k, fp8", lengths=_many(64, 4095), page_dtype=FLOAT8),
    Case(name="decode 64 x 4k, softcap", lengths=_many(64, 4095), softcap=30.0),
    Case(name="decode 64, 256..8k", lengths=tuple((256 + 127 * i, 1) for i in range(64))),
    Case(name="decode 256 x 512", lengths=_many(256, 511)),
    Case(name="decode 64 x 8k, window 1k+4", lengths=_many(64, 8191), window=1024, sinks=4),
    Case(name="decode 64 x 4k, head 64", lengths=_many(64, 4095), dim=64, heads=32),
    Case(name="decode 64 x 4k, head 96", lengths=_many(64, 4095), dim=96, heads=32),
    Case(name="decode 64 x 4k, head 256", lengths=_many(64, 4095), dim=256, heads=16, kv_heads=4),
    Case(name="decode 64 x 4k, 8 heads of 8", lengths=_many(64, 4095), heads=8),
    Case(name="prefill 8k", lengths=((0, 8192),)),
    Case(name="prefill 8k, blocks of 32", lengths=((0, 8192),), block=32),
    Case(name="prefill 8k, fp8", lengths=((0, 8192),), page_dtype=FLOAT8),
    Case(name="prefill 8k, window 1k", lengths=((0, 8192),), window=1024),
    Case(name="prefill 8k, head 64", lengths=((0, 8192),), dim=64),
    Case(name="prefill 8k, head 256", lengths=((0, 8192),), dim=256, heads=16, kv_heads=4),
    Case(name="prefill 2k after 6k", lengths=((6144, 2048),)),
    Case(name="prefill 8 x 1k", lengths=_many(8, 0, 1024)),
    Case(name="prefill 32, 16..1k", lengths=tuple((64 * i, 16 + 32 * i) for i in range(32))),
    Case(name="mixed 2k + 64 x 4k", lengths=(*_many(64, 4095), (0, 2048))),
)


def tiny_cases() -> Sequence[Case]:
    """The same kinds where an interpreter runs them."""
    half = torch.float16
    tiny = Case(
        name="", lengths=(), heads=2, kv_heads=1, dim=16, block=16, dtype=half, page_dtype=half
    )
    return (
        replace(tiny, name="decode", lengths=_many(2, 20)),
        replace(tiny, name="prefill", lengths=((0, 20),)),
        replace(tiny, name="mixed, fp8", lengths=((30, 1), (5, 20)), page_dtype=FLOAT8),
    )
