"""What lies in the pages, so that every byte can be checked by a rank that holds other heads.

The content of slot ``s`` at the context ranks is ``s``: half the tokens of each head of keys or
values of each layer there is noise, the same everywhere, combined with a number made of the slot,
layer, role, head and half.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.transfer.cases import Model, Slots
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole
from kvcache_core.storage import TorchStorage

WORD_BYTES: Final = 8
SPREAD: Final = 0x9E3779B97F4A7C15
ROLES: Final = {BufferRole.KEY: 0, BufferRole.VALUE: 1}


class Content:
    """Fills and checks the one pool of a rank, slot by slot."""

    def __init__(
        self, model: Model, plan: LayoutPlan, storage: TorchStorage, first_head: int
    ) -> None:
        """``plan`` tells the pages of whoever looks at ``storage``."""
        self._pool = storage.pool_bytes(0, 0)
        words = model.run_bytes // WORD_BYTES
        device = self._pool.device
        noise = np.random.default_rng(7).integers(0, 1 << 63, words, dtype=np.int64)
        self._noise = torch.from_numpy(noise).to(device)
        self._keys = torch.from_numpy(_keys(model, plan, first_head)).to(device)

    def fill(self) -> None:
        """Give every slot its own number's content."""
        for slot in range(len(self._pool)):
            rows = self._pool[slot].view(torch.int64).view(len(self._keys), -1)
            torch.bitwise_xor(self._noise, self._row_keys(slot), out=rows)
        self._synchronize()

    def erase(self, slots: Slots) -> None:
        """Zero these slots."""
        for slot in slots:
            self._pool[int(slot)].zero_()
        self._synchronize()

    def check(self, slots: Slots, sources: Slots) -> None:
        """``slots`` hold what ``sources`` hold at the context ranks. Raises RuntimeError."""
        for slot, source in zip(slots, sources, strict=True):
            rows = self._pool[int(slot)].view(torch.int64).view(len(self._keys), -1)
            if not torch.equal(rows, torch.bitwise_xor(self._noise, self._row_keys(int(source)))):
                raise RuntimeError(
                    f"slot {slot}: expected the bytes of the senders' slot {source}, got others"
                )

    def _row_keys(self, slot: int) -> torch.Tensor:
        # A product of an odd number: no two slots, rows or heads have one key.
        return (self._keys + (slot + 1) * 0x100000001B3).unsqueeze(1)

    def _synchronize(self) -> None:
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)


def _keys(model: Model, plan: LayoutPlan, first_head: int) -> npt.NDArray[np.int64]:
    """A number for each run of ``run_bytes`` in a slot, by layer, role, head and half."""
    (view,) = plan.views
    halves = 2 // view.geometry.pages_per_block
    heads = view.geometry.num_heads
    keys = np.zeros(plan.pool_groups[0].slot_bytes[0] // model.run_bytes, dtype=np.uint64)
    for buffer in view.buffers:
        start = buffer.offset_bytes // model.run_bytes
        buffer_number = buffer.layer_id * 2 + ROLES[buffer.role]
        for run in range(2 * heads):
            # A page is [heads, tokens], so that halves alternate within it or lie in two pages.
            page, place = divmod(run, heads * halves)
            head, half = place // halves, page + place % halves
            number = (buffer_number * model.kv_heads + first_head + head) * 2 + half
            keys[start + run] = (number + 1) * SPREAD % (1 << 64)
    return keys.view(np.int64)
