"""The geometry of pages and the address of a buffer.

The one address rule is ``base + slot * slot_bytes + offset``. A page is
``[num_heads, tokens_per_page, elements_per_head]``; pages of a buffer follow each other at
``page_stride_bytes``, a multiple of PAGE_ALIGNMENT_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_core.arithmetic import round_up
from kvcache_core.spec import BufferRole, BufferSpec, ElementType, PageMapping

PAGE_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class PageGeometry:
    """Shape of the pages of one view. For a state ``tokens_per_page`` is 0 and ``pages_per_block``
    1.
    """

    mapping: PageMapping
    dtype: ElementType
    num_heads: int
    elements_per_head: int
    tokens_per_page: int
    pages_per_block: int
    sections: tuple[int, ...] = ()

    @classmethod
    def of(cls, buffer: BufferSpec, tokens_per_block: int) -> PageGeometry:
        """Geometry of a buffer. Raises ValueError when its pages do not divide the block."""
        tokens_per_page = buffer.tokens_per_page or tokens_per_block
        if tokens_per_block % tokens_per_page:
            raise ValueError(
                f"{buffer.role.value} pages of {tokens_per_page} tokens do not divide blocks of "
                f"{tokens_per_block}; choose a divisor"
            )
        return cls(
            mapping=buffer.mapping,
            dtype=buffer.dtype,
            num_heads=buffer.num_heads,
            elements_per_head=buffer.elements_per_head,
            tokens_per_page=0 if buffer.is_state else tokens_per_page,
            pages_per_block=1 if buffer.is_state else tokens_per_block // tokens_per_page,
            sections=buffer.sections,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of data in one page."""
        row = self.dtype.bytes_of(self.elements_per_head)
        return self.num_heads * max(self.tokens_per_page, 1) * row

    @property
    def page_stride_bytes(self) -> int:
        """Distance between neighbouring pages of a buffer."""
        return round_up(self.page_bytes, PAGE_ALIGNMENT_BYTES)

    @property
    def buffer_bytes(self) -> int:
        """The expanded size: all pages of one block of one buffer."""
        return self.page_stride_bytes * self.pages_per_block


@dataclass(frozen=True, kw_only=True)
class BufferAddress:
    """Where one buffer of one layer lies: ``pool base + slot * slot_bytes + offset_bytes``,
    ``bytes`` long.

    ``bytes`` is the expanded size; ``page_bytes`` of data start at each multiple of
    ``page_stride_bytes`` in it.
    """

    layer_id: int
    role: BufferRole
    layer_group: int
    pool_group: int
    pool: int
    offset_bytes: int
    bytes: int
    slot_bytes: int
    geometry: PageGeometry

    def byte_offset(self, slot: int, page: int = 0) -> int:
        """Offset in the pool of page ``page`` of this buffer in ``slot``."""
        return slot * self.slot_bytes + self.offset_bytes + page * self.geometry.page_stride_bytes
