"""Index spaces: how a kernel's page index relates to a slot.

Kernels count in pages of their own buffer, transfers and copies in slots. Every space is the affine
map ``index = slot * scale + bias`` (then ``+ page`` inside the buffer) over bytes
``base_offset_bytes + index * unit_bytes``, and it is checked against the address rule when made:

    RAW_SLOT   unit = the slot, base = the buffer's offset; for kernels that take slot strides
    SHARED     unit = a page, base = the buffer's offset; one list of indices serves all layers
    PER_LAYER  unit = a page, base = the pool; one pointer serves all layers
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_core.address import BufferAddress
from kvcache_core.errors import invariant
from kvcache_core.spec import IndexKind

__all__ = ["CHECKED_SLOTS", "IndexKind", "IndexSpace", "allocation_extents"]

CHECKED_SLOTS = (0, 1, 2, 7, 1_000_003)


@dataclass(frozen=True, kw_only=True)
class IndexSpace:
    """One affine map. ``pages_per_block`` indices follow each other for one slot."""

    kind: IndexKind
    scale: int
    bias: int
    unit_bytes: int
    base_offset_bytes: int
    pages_per_block: int

    @classmethod
    def of(cls, address: BufferAddress, kind: IndexKind) -> IndexSpace:
        """The space of one buffer. Raises ValueError when pages do not tile the slot."""
        if kind is IndexKind.RAW_SLOT:
            space = cls(
                kind=kind,
                scale=1,
                bias=0,
                unit_bytes=address.slot_bytes,
                base_offset_bytes=address.offset_bytes,
                pages_per_block=1,
            )
        else:
            unit = address.geometry.page_stride_bytes
            if address.slot_bytes % unit or address.offset_bytes % unit:
                raise ValueError(
                    f"layer {address.layer_id} {address.role.value}: pages of {unit} bytes do not "
                    f"tile slots of {address.slot_bytes} bytes; use raw slots"
                )
            shared = kind is IndexKind.SHARED
            space = cls(
                kind=kind,
                scale=address.slot_bytes // unit,
                bias=0 if shared else address.offset_bytes // unit,
                unit_bytes=unit,
                base_offset_bytes=address.offset_bytes if shared else 0,
                pages_per_block=address.geometry.pages_per_block,
            )
        space.check(address)
        return space

    def check(self, address: BufferAddress) -> None:
        """Go to pages and back. Raises InvariantViolation when the address rule says otherwise."""
        for slot in CHECKED_SLOTS:
            for page in {0, self.pages_per_block - 1}:
                index = slot * self.scale + self.bias + page
                invariant(
                    self.byte_offset(index) == address.byte_offset(slot, page),
                    f"{self} maps slot {slot} page {page} to {self.byte_offset(index)}, "
                    f"its address is {address.byte_offset(slot, page)}",
                )
                invariant(
                    self.slot_of(index) == slot, f"{self} does not map {index} back to {slot}"
                )

    def byte_offset(self, index: int) -> int:
        """Offset in the pool of the page with this index."""
        return self.base_offset_bytes + index * self.unit_bytes

    def slot_of(self, index: int) -> int:
        """The slot that holds a page index."""
        return (index - self.bias) // self.scale

    def upper_bound(self, num_slots: int) -> int:
        """One more than the greatest index of a pool of ``num_slots`` slots."""
        return (num_slots - 1) * self.scale + self.bias + self.pages_per_block

    def expand(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Page indices for slots: int32 ``[..., n]`` to ``[..., n * pages_per_block]``.

        Missing blocks (-1) become index 0, which kernels do not read. One vectorised pass.
        """
        pages = np.arange(self.pages_per_block, dtype=np.int32)
        indices = slots[..., None] * np.int32(self.scale) + np.int32(self.bias) + pages
        expanded = np.where(slots[..., None] < 0, np.int32(0), indices)
        return expanded.reshape(*slots.shape[:-1], slots.shape[-1] * self.pages_per_block)


def allocation_extents(slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Blocks that rows of a block table span: int32 ``[..., n]`` to ``[...]``.

    The extent ends behind the last valid entry, however many blocks in front of it are missing
    (-1): a window drops its oldest pages and keeps its position.
    """
    valid = slots >= 0
    blocks = slots.shape[-1]
    if not blocks:
        return np.zeros(slots.shape[:-1], dtype=np.int64)
    last = blocks - np.argmax(valid[..., ::-1], axis=-1)
    return np.where(valid.any(axis=-1), last, 0).astype(np.int64)
