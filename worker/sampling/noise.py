"""Counter-based Gumbel noise: a pure function of (seed, choice, output index, token id).

Drawing is ``argmax(logits / temperature + noise)``, which is a draw from the softmax. The same
request draws the same token in any batch, on any worker and device: the hash is integer arithmetic
modulo 2**32 (torch's int32 wraps on CPU and GPU alike), and its 52 bits become a float64 strictly
between 0 and 1 without rounding.

    a, b, c = 96 bits of a SplitMix64 chain over seed, choice, output index     once a row
    high    = mix2(mix1(token * GOLDEN32 + a) ^ b)                              32 bits a token
    low     = mix1(high ^ c) >> 12                                              20 bits a token
    noise   = -log(-log((high * 2**20 + low + 0.5) / 2**52))

The high bits alone bound the noise, so that a draw on CPU takes logarithms of a few tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.ports import Draw

GOLDEN: Final = 0x9E3779B97F4A7C15
GOLDEN32: Final = 0x9E3779B1
UNIFORM_BITS: Final = 52
LOW_BITS: Final = 20


def signed32(value: int) -> int:
    """The int32 with the low 32 bits of ``value``."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


@dataclass(frozen=True)
class Mixer:
    """A bijection of 32 bits: shift-xor, multiply, shift-xor, multiply, shift-xor."""

    shifts: tuple[int, int, int]
    factors: tuple[int, int]

    def apply_(self, value: torch.Tensor) -> torch.Tensor:
        """Mix an int32 tensor in place."""
        first, second, third = self.shifts
        _xor_shift_(value, first).mul_(self.factors[0])
        _xor_shift_(value, second).mul_(self.factors[1])
        return _xor_shift_(value, third)


FIRST_MIXER: Final = Mixer((16, 15, 16), (signed32(0x7FEB352D), signed32(0x846CA68B)))
SECOND_MIXER: Final = Mixer((16, 13, 16), (signed32(0x85EBCA6B), signed32(0xC2B2AE35)))


def mix64(value: int) -> int:
    """SplitMix64's step over 64 bits: every output bit depends on every input bit."""
    mask = (1 << 64) - 1
    value = (value + GOLDEN) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def row_key(row: Draw) -> tuple[int, int, int]:
    """Key of a row's noise: three int32."""
    key = mix64(mix64(mix64(row.params.seed) + row.choice) + row.output_index)
    return signed32(key), signed32(key >> 32), signed32(mix64(key))


def row_keys(rows: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """int32 ``[3, rows, 1]``."""
    keys = torch.tensor([row_key(row) for row in rows], dtype=torch.int32)
    return keys.t().unsqueeze(2).to(device)


def key_rows(rows: Sequence[Draw]) -> npt.NDArray[np.int32]:
    """int32 ``[3, rows]``: the same keys, many at once."""
    seeds, choices, indices = np.array(
        [(row.params.seed, row.choice, row.output_index) for row in rows], np.uint64
    ).T
    key = _mix64_rows(_mix64_rows(_mix64_rows(seeds) + choices) + indices)
    parts = (key, key >> np.uint64(32), _mix64_rows(key))
    return np.stack([part.astype(np.uint32) for part in parts]).view(np.int32)


def _mix64_rows(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """:func:`mix64` of each."""
    value = value + np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def high_bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The upper 32 of each token's 52 bits, as int32 of the same pattern.

    ``keys`` is int32 ``[3, rows, 1]``, ``tokens`` int32 ``[rows, n]`` or ``[1, n]``.
    """
    value = FIRST_MIXER.apply_(tokens * signed32(GOLDEN32) + keys[0])
    return SECOND_MIXER.apply_(value.bitwise_xor_(keys[1]))


def gumbel_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 noise of each row's tokens; arguments as for :func:`high_bits`."""
    high = high_bits(keys, tokens)
    low = FIRST_MIXER.apply_(high.bitwise_xor(keys[2]))
    bits = (high.long() & 0xFFFFFFFF) << LOW_BITS
    bits |= (low.long() & 0xFFFFFFFF) >> (32 - LOW_BITS)
    uniform = bits.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def least_high_bits(noise: float) -> int:
    """The smallest unsigned value that the high bits of a token with more noise than this can
    have.
    """
    uniform = math.exp(-math.exp(-noise)) if noise > -6.0 else 0.0
    return max(0, min(math.floor(uniform * 2.0**32) - 1, 0xFFFFFFFF))


def _xor_shift_(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift and xor: torch's own shift keeps the sign, which is masked away."""
    return value.bitwise_xor_((value >> bits).bitwise_and_((1 << (32 - bits)) - 1))
