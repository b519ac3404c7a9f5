"""From which chunk on torch's attention over gathered keys beats the prefill kernel: both measured
for the same shapes, and the rates that the backend chooses by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch

from benchmarks.attention.cases import Case
from benchmarks.attention.memory import Memory
from benchmarks.timing import device_seconds
from worker.model.attention import LayerPages, Scratch
from worker.model.gathered_prefill import GatheredPrefill, GatheredSpan, GatheringLayers
from worker.model.prefill_choice import (
    AttentionShape,
    Chunk,
    PrefillRates,
    pairs,
    torch_is_faster,
)
from worker.model.triton_attention import read

CHUNKS: Final[dict[str, Sequence[Chunk]]] = {
    "cuda": (
        (0, 64), (0, 256), (0, 512), (0, 1024), (0, 2048), (0, 8192),
        (2048, 64), (2048, 512), (6144, 512), (6144, 2048), (30720, 512), (30720, 2048),
    ),
    "cpu": ((0, 16), (16, 16)),
}  # fmt: skip
"""The longest without a prefix, and the longest with one, give the rates."""
UNKNOWN: Final = PrefillRates(kernel_flops=1.0, torch_flops=1.0, gather_bytes=1.0, call_s=0.0)


def crossover(like: Case, device: torch.device) -> dict[str, Any]:
    """Seconds of both ways for each chunk, the rates that follow, and what they choose."""
    rows = list(measured(like, device))
    rates = fitted(rows, like)
    for row in rows:
        chosen = torch_is_faster([row["chunk"]], shape_of(like), rates)
        row["chosen"] = "torch" if chosen else "kernel"
        row["lost"] = round(row[f"{row['chosen']}_us"] / min(row["kernel_us"], row["torch_us"]), 3)
    return {"rates": asdict(rates), "chunks": rows}


def measured(like: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """One layer's prefill, read only, a line a chunk."""
    for chunk in CHUNKS[device.type]:
        case = replace(like, name=str(chunk), lengths=(chunk,))
        memory = Memory(case, device, 2)
        scale = case.dim**-0.5
        gathered = _gathered(memory, chunk)
        out = torch.empty_like(memory.query)

        def by_kernel(memory: Memory = memory, scale: float = scale) -> None:
            read(memory.pages[0], memory.metadata, memory.query, scale)

        def by_torch(
            memory: Memory = memory,
            scale: float = scale,
            gathered: GatheredPrefill = gathered,
            out: torch.Tensor = out,
        ) -> None:
            gathered.attend(0, memory.query, memory.new, out, scale)

        yield {
            "chunk": chunk,
            "kernel_us": round(device_seconds(by_kernel, device) * 1e6, 1),
            "torch_us": round(device_seconds(by_torch, device) * 1e6, 1),
        }


def fitted(rows: Sequence[dict[str, Any]], like: Case) -> PrefillRates:
    """Operations a second from the longest chunk, the gather from the longest with a prefix, what a
    call costs from the shortest chunk.
    """
    operations = 4 * like.heads * like.dim
    first = [row for row in rows if not row["chunk"][0]]
    longest = max(first, key=lambda row: pairs(row["chunk"]))
    later = max((row for row in rows if row["chunk"][0]), key=lambda row: pairs(row["chunk"]))
    work = pairs(longest["chunk"]) * operations
    torch_flops = work / longest["torch_us"] * 1e6
    token_bytes = 2 * like.kv_heads * like.dim * like.page_dtype.itemsize
    gathered = sum(later["chunk"]) * token_bytes
    products_us = pairs(later["chunk"]) * operations / torch_flops * 1e6
    return PrefillRates(
        kernel_flops=work / longest["kernel_us"] * 1e6,
        torch_flops=torch_flops,
        gather_bytes=gathered / max(later["torch_us"] - products_us, 1.0) * 1e6,
        call_s=min(row["torch_us"] for row in rows) / 1e6,
    )


def shape_of(case: Case) -> AttentionShape:
    """The layer of a case."""
    return AttentionShape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        element_bytes=case.page_dtype.itemsize,
    )


def _gathered(memory: Memory, chunk: Chunk) -> GatheredPrefill:
    start, count = chunk
    pages = memory.pages[0]
    layer = LayerPages(pages.pages, 0, pages.scales)
    gathering = GatheringLayers({0: layer}, UNKNOWN, Scratch(memory.query))
    span = GatheredSpan(0, slice(0, count), start, start + count)
    return GatheredPrefill(gathering, (span,), (memory.metadata.groups[0].block_table,))
