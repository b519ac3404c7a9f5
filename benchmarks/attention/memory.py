"""Pages of several layers, and steps over them."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.cases import Case
from kvcache_core.arithmetic import ceil_div
from worker.model.page_numbers import FLOAT8
from worker.model.step import GroupGeometry, SequenceSlice, order
from worker.model.step_metadata import MetadataShape, StepMetadata, describe_step
from worker.model.triton_attention import KernelPages

SCALE_OF_FLOAT8 = 0.02


class Memory:
    """One case on one device. ``layers`` layers are used in turn, so that no cache holds their
    pages; blocks have no order.
    """

    def __init__(self, case: Case, device: torch.device, layers: int) -> None:
        self.case = case
        blocks = [ceil_div(start + count, case.block) for start, count in case.lengths]
        slots = sum(blocks)
        geometry = GroupGeometry(case.block, case.window, case.sinks, slots, 1)
        page = case.page or case.block
        shape = (slots, layers, 2, case.block // page, case.kv_heads, page, case.dim)
        self._raw = torch.empty(shape, dtype=case.page_dtype, device=device)
        for layer in range(layers):
            numbers = torch.randn((slots, *shape[2:]), dtype=case.dtype, device=device)
            if case.page_dtype == FLOAT8:
                numbers = numbers / SCALE_OF_FLOAT8 / 8
            self._raw[:, layer] = numbers.to(case.page_dtype)
        scales = None
        if case.page_dtype == FLOAT8:
            scales = torch.full((2, case.kv_heads), SCALE_OF_FLOAT8, device=device)
        self.pages = []
        for layer in range(layers):
            view = self._raw[:, layer]
            view = view if case.page else view[:, :, 0]
            self.pages.append(KernelPages(view, 0, geometry, scales))
        order_of_slots = np.random.default_rng(1).permutation(slots).astype(np.int32)
        tables = np.split(order_of_slots, np.cumsum(blocks)[:-1])
        batch = [
            SequenceSlice(np.zeros(count, np.int32), start, (table,), wants_logits=False)
            for (start, count), table in zip(case.lengths, tables, strict=True)
        ]
        pieces = [batch[i] for i in order(batch)]
        self._tables = [piece.block_tables[0] for piece in pieces]
        shape_of_step = MetadataShape.of(pieces, [geometry])
        vector = describe_step(pieces, [geometry], shape_of_step)
        self.metadata = StepMetadata(shape_of_step, torch.from_numpy(vector).to(device))
        rows = shape_of_step.rows
        self.query = torch.randn(rows, case.heads, case.dim, dtype=case.dtype, device=device)
        self.new = torch.randn(rows, 2, case.kv_heads, case.dim, dtype=case.dtype, device=device)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, keys and values of the first layer of a plain case as torch's attention takes
        them: contiguous ``[sequences, heads, tokens, head_dim]``.
        """
        (length,) = set(self.case.lengths)
        tokens = sum(length)
        by_sequence = []
        for table in self._tables:
            pages = self._raw[torch.from_numpy(table).long().to(self._raw.device), 0]
            # blocks, 2, pages, kv_heads, tokens, dim -> 2, kv_heads, tokens, dim
            rows = pages.permute(1, 3, 0, 2, 4, 5).flatten(2, 4)[:, :, :tokens]
            by_sequence.append(rows)
        keys, values = torch.stack(by_sequence, 1).unbind(0)
        query = self.query.view(len(self._tables), length[1], *self.query.shape[1:]).transpose(1, 2)
        return query.contiguous(), keys.contiguous(), values.contiguous()

    def torch_attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """What torch offers for the plain cases."""
        return scaled_dot_product_attention(
            query, keys, values, is_causal=not self.case.is_decode, enable_gqa=True
        )
