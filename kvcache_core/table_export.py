"""Block tables of a batch as the page indices of one index space, in one preallocated array.

Nothing else is exported: who needs several index spaces makes one exporter for each and runs those
that a step reads. Row ``r`` belongs to table ``r`` of the batch; missing blocks (-1), the rest of
each row and all rows beyond the batch are 0, which kernels do not read. The array is reused, so its
address may be captured in a graph; its owner uploads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.index_space import IndexSpace

Table = npt.NDArray[np.int32]
"""Slot per block ordinal, -1 where there is no page."""

MISSING = -1


class TableExporter:
    """Exports into ``out``, int32 ``[max_rows, max_blocks * pages_per_block]``, C contiguous.

    One concatenation lays tables and padding side by side, one affine pass serves all rows. A
    missing block comes out negative, because a buffer lies inside its slot (``bias +
    pages_per_block <= scale``), so one ``maximum`` clears it.
    """

    def __init__(self, space: IndexSpace, out: Table) -> None:
        """Clears ``out``, which may be the ``numpy()`` of a pinned host tensor.

        Raises ValueError for an array of another kind.
        """
        pages = space.pages_per_block
        if out.dtype != np.int32 or out.ndim != 2 or not out.flags.c_contiguous:
            raise ValueError(
                "expected a C contiguous int32 array [max_rows, max_blocks * pages_per_block], "
                f"got {out.dtype} {out.shape}"
            )
        if out.shape[1] % pages:
            raise ValueError(f"expected whole blocks of {pages} pages a row, got {out.shape[1]}")
        self.space = space
        self.out = out
        self.max_rows, columns = out.shape
        self.max_blocks = columns // pages
        self._slots = np.empty(self.max_rows * self.max_blocks, dtype=np.int32)
        missing = np.full(self.max_blocks, MISSING, dtype=np.int32)
        self._padding = [missing[:blocks] for blocks in range(self.max_blocks + 1)]
        self._rows = 0
        self._blocks = 0
        """Extent of what ``out`` holds beside zeros."""
        out.fill(0)

    @classmethod
    def allocate(cls, space: IndexSpace, max_rows: int, max_blocks: int) -> TableExporter:
        """An exporter with an array of its own."""
        shape = (max_rows, max_blocks * space.pages_per_block)
        return cls(space, np.zeros(shape, dtype=np.int32))

    def export(self, tables: Sequence[Table]) -> None:
        """Write the tables of a batch, one a row.

        Raises ValueError, and writes nothing, for too many rows or a row longer than the array's.
        """
        rows = len(tables)
        if rows > self.max_rows:
            raise ValueError(f"expected at most {self.max_rows} rows, got {rows}")
        lengths = [len(table) for table in tables]
        blocks = max(lengths, default=0)
        if blocks > self.max_blocks:
            self._refuse(enumerate(lengths))
        pages = self.space.pages_per_block
        if rows < self._rows:
            self.out[rows : self._rows, : self._blocks * pages] = 0
        if blocks < self._blocks:
            self.out[:rows, blocks * pages : self._blocks * pages] = 0
        self._rows, self._blocks = rows, blocks
        if not blocks:
            return
        padding = self._padding
        parts: list[Table] = []
        for table, length in zip(tables, lengths, strict=True):
            parts.append(table)
            if length < blocks:
                parts.append(padding[blocks - length])
        slots = self._slots[: rows * blocks]
        np.concatenate(parts, out=slots)
        self._write(slots.reshape(rows, blocks), self.out[:rows, : blocks * pages])

    def update(self, changed: Mapping[int, Table]) -> None:
        """Write only these rows of the batch last exported; the others keep what they hold.

        Raises ValueError, and writes nothing, for a row outside that batch or too long a table.
        """
        for row in changed:
            if not 0 <= row < self._rows:
                raise ValueError(f"expected rows of the batch, 0..{self._rows - 1}, got {row}")
        self._refuse((row, len(table)) for row, table in changed.items())
        pages = self.space.pages_per_block
        for row, table in changed.items():
            blocks = len(table)
            line = self.out[row : row + 1]
            self._write(table[None], line[:, : blocks * pages])
            line[:, blocks * pages : self._blocks * pages] = 0
            self._blocks = max(self._blocks, blocks)

    def _refuse(self, lengths: Iterable[tuple[int, int]]) -> None:
        for row, length in lengths:
            if length > self.max_blocks:
                raise ValueError(
                    f"row {row}: expected a table of at most {self.max_blocks} blocks, got {length}"
                )

    def _write(self, slots: Table, out: Table) -> None:
        """Indices of ``slots`` ``[rows, blocks]`` into ``out`` ``[rows, blocks * pages]``."""
        space = self.space
        pages = space.pages_per_block
        if pages > 1:
            indices = slots * np.int32(space.scale)
            for page in range(pages):
                np.add(indices, space.bias + page, out=out[:, page::pages])
            np.maximum(out, 0, out=out)
        elif space.scale == 1 and not space.bias:
            np.maximum(slots, 0, out=out)
        else:
            np.multiply(slots, space.scale, out=out)
            if space.bias:
                out += space.bias
            np.maximum(out, 0, out=out)
