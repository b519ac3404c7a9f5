"""A paged model with hand-made block tables: slots in shuffled order, garbage in unused pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvcache_core.arithmetic import ceil_div
from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from worker.config import ElementType, KVElementType
from worker.model.backend import BackendMaker, backend_of
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import ModelRunner, SequenceSlice

Ints = npt.NDArray[np.int32]


class PagedModel:
    """One model, pools of ``slots`` slots, sequences by name; stale blocks of windowed groups get
    other sequences' slots.
    """

    def __init__(
        self,
        path: Path,
        *,
        tokens_per_block: int = 8,
        slots: int = 96,
        seed: int = 0,
        device: str = "cpu",
        dtype: ElementType = "float32",
        kv_dtype: KVElementType = "auto",
        backend: BackendMaker = backend_of,
        make_runner: Callable[[LoadedModel, LayoutPlan, TorchStorage], ModelRunner] | None = None,
    ) -> None:
        self.loaded = load_model(path, device=device, dtype=dtype, kv_dtype=kv_dtype)
        self.plan = LayoutPlan.derive(self.loaded.specs, tokens_per_block=tokens_per_block)
        storage = TorchStorage(self.plan, [slots] * len(self.plan.pool_groups), self.loaded.device)
        for group in self.plan.pool_groups:
            for pool in range(len(group.slot_bytes)):
                storage.pool_bytes(group.id, pool).fill_(0xFF)  # NaN in every float type
        self.storage = storage
        self.runner = (
            ModelRunner(self.loaded, self.plan, storage, backend=backend)
            if make_runner is None
            else make_runner(self.loaded, self.plan, storage)
        )
        random = np.random.default_rng(seed)
        self._free = {g.id: list(random.permutation(slots)) for g in self.plan.pool_groups}
        self._tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}

    def slice(
        self, name: str, tokens: Sequence[int], *, wants_logits: bool = True
    ) -> SequenceSlice:
        """Append tokens to a sequence and give the slice that computes them."""
        known = self.tokens.setdefault(name, [])
        tables = self._tables.setdefault(name, [[] for _ in self.plan.layer_groups])
        start = len(known)
        known.extend(tokens)
        for group, table in zip(self.plan.layer_groups, tables, strict=True):
            free = self._free[group.pool_group]
            while len(table) < ceil_div(len(known), self.plan.tokens_per_block):
                table.append(int(free.pop()))
            first, end = group.life_cycle.stale_range(start, self.plan.tokens_per_block)
            for block in range(first, end):
                if table[block] >= 0:
                    free.insert(0, table[block])
                    table[block] = -1
        return SequenceSlice(
            tokens=np.array(tokens, np.int32),
            start=start,
            block_tables=tuple(np.array(table, np.int32) for table in tables),
            wants_logits=wants_logits,
        )

    def feed(self, **pieces: Sequence[int]) -> torch.Tensor:
        """One step over several sequences; logits of each one's last token, on CPU."""
        return self.runner.forward([self.slice(n, t) for n, t in pieces.items()]).cpu()
