"""Whether a step's prefills run in our kernel, which reads pages where they lie, or in torch's
attention over gathered keys and values: a pure function of shapes and of what a device was measured
to do.

``python -m benchmarks.attention --crossover`` measures the rates of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Chunk = tuple[int, int]
"""Tokens before a chunk, and tokens of it."""


@dataclass(frozen=True, kw_only=True)
class PrefillRates:
    """Of one device, for long chunks in the model's type."""

    kernel_flops: float
    """Operations a second of our kernel, over visible keys alone."""
    torch_flops: float
    """Likewise torch's attention over contiguous keys."""
    gather_bytes: float
    """Bytes of keys and values gathered a second."""
    call_s: float
    """What one chunk of a layer costs torch beside that: calls that a launch of ours does not
    have.
    """


MEASURED: Final[PrefillRates | None] = None
"""None: everything runs in the kernel. An H200's would send long first chunks to cuDNN, which makes
a plan of some 40 ms for every new length.
"""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    """Of a number in the pages."""


def pairs(chunk: Chunk) -> int:
    """Queries and the keys that they see, counted together."""
    start, count = chunk
    return count * start + count * (count + 1) // 2


def kernel_s(chunks: Sequence[Chunk], shape: AttentionShape, rates: PrefillRates) -> float:
    """Seconds of a layer in our kernel."""
    work = sum(map(pairs, chunks)) * 4 * shape.heads * shape.head_dim
    return work / rates.kernel_flops


def torch_s(chunks: Sequence[Chunk], shape: AttentionShape, rates: PrefillRates) -> float:
    """Seconds of a layer in torch's attention. A chunk at the beginning has its keys at hand."""
    work = sum(map(pairs, chunks)) * 4 * shape.heads * shape.head_dim
    token_bytes = 2 * shape.kv_heads * shape.head_dim * shape.element_bytes
    gathered_bytes = sum(start + count for start, count in chunks if start) * token_bytes
    passes_s = gathered_bytes / rates.gather_bytes + len(chunks) * rates.call_s
    return work / rates.torch_flops + passes_s


def torch_is_faster(
    chunks: Sequence[Chunk], shape: AttentionShape, rates: PrefillRates | None
) -> bool:
    """Whether all prefills of a step go to torch; without rates none do."""
    if rates is None or not chunks:
        return False
    return torch_s(chunks, shape, rates) < kernel_s(chunks, shape, rates)
