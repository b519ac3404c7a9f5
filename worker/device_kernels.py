"""Gather and scatter as one Triton kernel each, which works out every index by itself.

A program copies TILE words of the message. Where units are longer than a few words the words that a
thread copies are neighbours on both ends, so they move as 16-byte vectors. A kernel is compiled a
word type and number of words in a unit: for nearly every layout the one that ``warm_up`` compiles.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from typing_extensions import override

from worker.device_copies import PIECE_BYTES, WORDS, UnitIndex, UnitMover

TILE: Final = 2048
WARPS: Final = 8


@triton.jit(do_not_specialize=["slot_units", "block_units"])
def _gather(  # noqa: PLR0913
    pool: tl.tensor,
    message: tl.tensor,
    slots: tl.tensor,
    units: tl.tensor,
    slot_units: tl.tensor,
    block_units: tl.tensor,
    words: tl.tensor,
    UNIT_WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = place < words
    row = place // UNIT_WORDS
    slot = tl.load(slots + row // block_units, mask=valid, other=0).to(tl.int64)
    unit = tl.load(units + row % block_units, mask=valid, other=0)
    origin = (slot * slot_units + unit) * UNIT_WORDS + place % UNIT_WORDS
    tl.store(message + place, tl.load(pool + origin, mask=valid), mask=valid)


@triton.jit(do_not_specialize=["slot_units", "block_units"])
def _scatter(  # noqa: PLR0913
    message: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    units: tl.tensor,
    slot_units: tl.tensor,
    block_units: tl.tensor,
    words: tl.tensor,
    UNIT_WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = place < words
    row = place // UNIT_WORDS
    slot = tl.load(slots + row // block_units, mask=valid, other=0).to(tl.int64)
    unit = tl.load(units + row % block_units, mask=valid, other=0)
    target = (slot * slot_units + unit) * UNIT_WORDS + place % UNIT_WORDS
    tl.store(pool + target, tl.load(message + place, mask=valid), mask=valid)


class TritonUnits(UnitMover):
    """The kernels, on CUDA."""

    def warm_up(self, device: torch.device) -> None:
        """Compile the usual kernels, so that no transfer has to wait for that."""
        word = WORDS[max(WORDS)]
        pool = torch.zeros((1, PIECE_BYTES // word.itemsize), dtype=word, device=device)
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        index = UnitIndex(slots, slots.long(), 1, pool.shape[1])
        message = torch.empty_like(pool).view(-1)
        self.gather(pool.view(-1), index, message)
        self.scatter(message, pool.view(-1), index)

    @override
    def gather(self, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor) -> None:
        words = message.numel()
        _gather[(triton.cdiv(words, TILE),)](
            pool, message, *_arguments(index, words), TILE, num_warps=WARPS
        )

    @override
    def scatter(self, message: torch.Tensor, pool: torch.Tensor, index: UnitIndex) -> None:
        words = message.numel()
        _scatter[(triton.cdiv(words, TILE),)](
            message, pool, *_arguments(index, words), TILE, num_warps=WARPS
        )


def _arguments(index: UnitIndex, words: int) -> tuple[object, ...]:
    block_units = index.units.numel()
    return index.slots, index.units, index.slot_units, block_units, words, index.unit_words
