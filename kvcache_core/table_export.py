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

    Tables are copied into a scratch array whose unused tails are missing blocks; one affine pass
    over it then serves all rows. A missing block comes out negative, because a buffer lies inside
    its slot (``bias + pages_per_block <= scale``), so one ``maximum`` clears it.
    """

    def __init__(self, space: IndexSpace, out: Table) -> None:
        """Clears ``out``. Raises ValueError for an array of another kind."""
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
        self._slots = np.full((self.max_rows, self.max_blocks), MISSING, dtype=np.int32)
        self._indices = np.empty_like(self._slots) if pages > 1 else self._slots[:0]
        self._lengths = [0] * self.max_rows
        """Blocks of each row in the scratch; what follows them is missing."""
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
        slots, known = self._slots, self._lengths
        for row, table in enumerate(tables):
            length = lengths[row]
            line = slots[row]
            line[:length] = table
            if length < known[row]:
                line[length : known[row]] = MISSING
        known[:rows] = lengths
        if rows < self._rows:
            self.out[rows : self._rows] = 0
        if blocks < self._blocks:
            self.out[:rows, blocks * self.space.pages_per_block :] = 0
        self._rows, self._blocks = rows, blocks
        self._write(slice(0, rows), blocks)

    def update(self, changed: Mapping[int, Table]) -> None:
        """Write only these rows of the batch last exported; the others keep what they hold.

        Raises ValueError, and writes nothing, for a row outside that batch or too long a table.
        """
        lengths = {row: len(table) for row, table in changed.items()}
        for row in lengths:
            if not 0 <= row < self._rows:
                raise ValueError(f"expected rows of the batch, 0..{self._rows - 1}, got {row}")
        self._refuse(lengths.items())
        for row, table in changed.items():
            length, known = lengths[row], self._lengths[row]
            line = self._slots[row]
            line[:length] = table
            if length < known:
                line[length:known] = MISSING
            self._lengths[row] = length
            self._write(slice(row, row + 1), max(length, known))
            self._blocks = max(self._blocks, length)

    def _refuse(self, lengths: Iterable[tuple[int, int]]) -> None:
        for row, length in lengths:
            if length > self.max_blocks:
                raise ValueError(
                    f"row {row}: expected a table of at most {self.max_blocks} blocks, got {length}"
                )

    def _write(self, rows: slice, blocks: int) -> None:
        """Indices of the first ``blocks`` blocks of ``rows``, from the scratch."""
        space = self.space
        pages = space.pages_per_block
        slots = self._slots[rows, :blocks]
        out = self.out[rows, : blocks * pages]
        if pages == 1:
            if space.scale == 1 and not space.bias:
                np.maximum(slots, 0, out=out)
                return
            np.multiply(slots, space.scale, out=out)
            if space.bias:
                out += space.bias
            np.maximum(out, 0, out=out)
            return
        indices = self._indices[rows, :blocks]
        np.multiply(slots, space.scale, out=indices)
        for page in range(pages):
            np.add(indices, space.bias + page, out=out[:, page::pages])
        np.maximum(out, 0, out=out)
