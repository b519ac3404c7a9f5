"""Codecs for cold pages: what the host tier keeps of a slot.

A codec sees whole slots as bytes and has a fixed ratio, so host slots have a fixed size. Without a
codec the bytes are identical. Nothing on the device or on the wire is ever encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from typing_extensions import override

from kvcache_core.spec import ElementType, KVCacheLayerSpec
from kvcache_core.storage.types import TORCH_TYPES

NARROWABLE = (ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16)
NARROW = (ElementType.BFLOAT16, ElementType.FLOAT16, ElementType.FLOAT8_E4M3)


class PageCodec(Protocol):
    """Encodes the slots of every pool of one plan."""

    def encoded_bytes(self, slot_bytes: int) -> int:
        """Size of a host slot for a device slot of ``slot_bytes``; a multiple of 8."""
        ...

    def encode(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, slot_bytes]`` to uint8 ``[n, encoded_bytes]``, on the same device."""
        ...

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, encoded_bytes]`` to uint8 ``[n, slot_bytes]``, on the same device."""
        ...


class NarrowingCodec(PageCodec):
    """Keeps every element as ``value / scale`` in a narrower floating-point type.

    Values beyond the narrow type's range saturate; NaN stays NaN. One element type for all buffers:
    see :func:`uniform_dtype`.
    """

    def __init__(self, dtype: ElementType, stored: ElementType, scale: float = 1.0) -> None:
        """``dtype`` is the pages' type, ``stored`` the host's. Raises ValueError."""
        if dtype not in NARROWABLE:
            raise ValueError(
                f"expected pages of one of {[kind.value for kind in NARROWABLE]}, "
                f"got {dtype.value}; leave the codec out"
            )
        if stored not in NARROW or stored.bits >= dtype.bits:
            raise ValueError(
                f"expected a narrower type than {dtype.value} out of "
                f"{[kind.value for kind in NARROW]}, got {stored.value}"
            )
        if not scale > 0:
            raise ValueError(f"expected a positive scale, got {scale}")
        self.dtype = dtype
        self.stored = stored
        self.scale = scale

    @classmethod
    def of(
        cls, specs: Sequence[KVCacheLayerSpec], stored: ElementType, scale: float = 1.0
    ) -> NarrowingCodec:
        """The codec for these layers; their type comes from the specs. Raises ValueError."""
        return cls(uniform_dtype(specs), stored, scale)

    @override
    def encoded_bytes(self, slot_bytes: int) -> int:
        return slot_bytes * self.stored.bits // self.dtype.bits

    @override
    def encode(self, slots: torch.Tensor) -> torch.Tensor:
        narrow = TORCH_TYPES[self.stored]
        limit = torch.finfo(narrow).max
        values = slots.view(TORCH_TYPES[self.dtype]).float() / self.scale
        return values.clamp_(-limit, limit).to(narrow).view(torch.uint8)

    @override
    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        values = encoded.view(TORCH_TYPES[self.stored]).float() * self.scale
        return values.to(TORCH_TYPES[self.dtype]).view(torch.uint8)


def uniform_dtype(specs: Sequence[KVCacheLayerSpec]) -> ElementType:
    """The one element type of all buffers of these layers.

    Raises ValueError naming two buffers of different types: a slot is encoded as a whole, so a
    buffer of another type would come back as noise.
    """
    buffers = [(spec, buffer) for spec in specs for buffer in spec.buffers]
    first_spec, first = buffers[0]
    for spec, buffer in buffers:
        if buffer.dtype is not first.dtype:
            raise ValueError(
                "expected cold pages of one element type, got "
                f"{first.dtype.value} (layer {first_spec.layer_id} {first.role.value}) and "
                f"{buffer.dtype.value} (layer {spec.layer_id} {buffer.role.value}); "
                "leave the codec out"
            )
    return first.dtype
