"""Gather and scatter as one Triton kernel each, which works out every index by itself.

A program copies up to TILE words of one block. Where units are longer than a few words the words
that a thread copies are neighbours on both ends, so they move as 16-byte vectors. A kernel is
compiled a word type, number of words in a unit and alignment: for nearly every layout the one that
``warm_up`` compiles. What was compiled is launched by itself afterwards: Triton's look at every
argument takes longer than the copy of a message.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from typing_extensions import override

from worker.device_copies import PIECE_BYTES, WORDS, UnitIndex, UnitMover

TILE: Final = 2048
WARPS: Final = 8
VECTOR_BYTES: Final = 16


@triton.jit(do_not_specialize=["slot_units", "block_units", "tiles"])
def _gather(  # noqa: PLR0913
    pool: tl.tensor,
    message: tl.tensor,
    slots: tl.tensor,
    units: tl.tensor,
    slot_units: tl.tensor,
    block_units: tl.tensor,
    tiles: tl.tensor,
    UNIT_WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    block = tl.program_id(0) // tiles
    place = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    valid = place < block_units * UNIT_WORDS
    unit = tl.load(units + place // UNIT_WORDS, mask=valid, other=0)
    slot = tl.load(slots + block).to(tl.int64)
    origin = (slot * slot_units + unit) * UNIT_WORDS + place % UNIT_WORDS
    target = block.to(tl.int64) * block_units * UNIT_WORDS + place
    tl.store(message + target, tl.load(pool + origin, mask=valid), mask=valid)


@triton.jit(do_not_specialize=["slot_units", "block_units", "tiles"])
def _scatter(  # noqa: PLR0913
    pool: tl.tensor,
    message: tl.tensor,
    slots: tl.tensor,
    units: tl.tensor,
    slot_units: tl.tensor,
    block_units: tl.tensor,
    tiles: tl.tensor,
    UNIT_WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    block = tl.program_id(0) // tiles
    place = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    valid = place < block_units * UNIT_WORDS
    unit = tl.load(units + place // UNIT_WORDS, mask=valid, other=0)
    slot = tl.load(slots + block).to(tl.int64)
    target = (slot * slot_units + unit) * UNIT_WORDS + place % UNIT_WORDS
    origin = block.to(tl.int64) * block_units * UNIT_WORDS + place
    tl.store(pool + target, tl.load(message + origin, mask=valid), mask=valid)


class TritonUnits(UnitMover):
    """The kernels, on one CUDA device."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, int, int, bool], Any] = {}

    def warm_up(self, device: torch.device) -> None:
        """Compile the usual kernels, so that no transfer has to wait for that."""
        pool = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device)
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        word_bytes = max(WORDS)
        index = UnitIndex(slots, slots.long(), 1, PIECE_BYTES // word_bytes, word_bytes)
        message = torch.empty_like(pool)
        self.gather(pool, index, message)
        self.scatter(message, pool, index)

    @override
    def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
        self._move(_gather, pool, message, index)

    @override
    def scatter(self, message: torch.Tensor, pool: torch.Tensor, index: UnitIndex) -> None:
        self._move(_scatter, pool, message, index)

    def _move(
        self, kernel: Any, pool: torch.Tensor, message: torch.Tensor, index: UnitIndex
    ) -> None:
        block_units = index.units.numel()
        tiles = triton.cdiv(block_units * index.unit_words, TILE)
        programs = tiles * index.slots.numel()
        counts = (index.slot_units, block_units, tiles, index.unit_words, TILE)
        pool_address, message_address = pool.data_ptr(), message.data_ptr()
        aligned = not (pool_address | message_address) % VECTOR_BYTES
        key = (kernel, index.unit_words, index.word_bytes, aligned)
        compiled = self._compiled.get(key)
        if compiled is None:
            word = WORDS[index.word_bytes]
            ends = pool.view(-1).view(word), message.view(word)
            self._compiled[key] = kernel[(programs,)](
                *ends, index.slots, index.units, *counts, num_warps=WARPS
            )
            return
        compiled[(programs, 1, 1)](
            pool_address,
            message_address,
            index.slots.data_ptr(),
            index.units.data_ptr(),
            *counts,
            stream=torch.cuda.current_stream(pool.device).cuda_stream,
        )
