"""Packed 4-bit numbers with block scales in plain torch: the reference for what a page holds.

A number is ``level * block scale * scale``: the level one of 16 (sign and 1, 2 bits of exponent and
mantissa), the block scale a float8_e4m3 byte for ``block`` neighbouring elements, ``scale`` one
float for all. Two levels share a byte, the even element in its low half.
"""

from __future__ import annotations

import torch

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOP = LEVELS[-1]


def quantize(values: torch.Tensor, block: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 data ``[..., n / 2]`` and uint8 scales ``[..., n / block]`` of float ``[..., n]``."""
    blocks = values.float().reshape(*values.shape[:-1], -1, block) / scale
    factors = (blocks.abs().amax(-1, keepdim=True) / TOP).to(torch.float8_e4m3fn)
    factor = factors.float()
    units = torch.where(factor > 0, blocks / factor, torch.zeros_like(blocks)).flatten(-2)
    levels = torch.tensor(LEVELS)
    codes = (units.abs()[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    codes = codes | ((units < 0).to(torch.uint8) << 3)
    data = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return data, factors.squeeze(-1).view(torch.uint8)


def dequantize(data: torch.Tensor, scales: torch.Tensor, block: int, scale: float) -> torch.Tensor:
    """float32 ``[..., n]`` of what :func:`quantize` gave."""
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).long()
    levels = torch.tensor(LEVELS)
    units = levels[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    factor = scales.contiguous().view(torch.float8_e4m3fn).float()
    blocks = units.reshape(*units.shape[:-1], -1, block) * factor[..., None]
    return blocks.flatten(-2) * scale
