"""The forward pass of a mixed batch: prefill chunks and single-token decodes of many sequences in
one flat row.

The runner owns no state but reused buffers: which slots a step reads and writes is in its batch,
the pages are the storage's. One thread uses a runner. After a forward the keys and values of every
new token are in the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import KVCacheLayerSpec
from kvcache_core.storage import TorchStorage
from worker.model.attention import LayerPages, Scratch, StepContext
from worker.model.decode import DecodeRunner, Decoding
from worker.model.errors import AttentionInputError
from worker.model.loader import LoadedModel
from worker.model.networks import Network, network_of
from worker.model.step import (
    GroupGeometry,
    SequenceSlice,
    begun_slots,
    check_batch,
    order,
    plan_group,
)

MakeDecoding = Callable[[tuple[LayerPages, ...], tuple[GroupGeometry, ...]], Decoding]
"""How decode steps run, once pages and their geometry are known."""

__all__ = ["ModelRunner", "SequenceSlice"]


class ModelRunner:
    """Runs one loaded model over one rank's pages.

    Raises:
        AttentionInputError: the plan lacks a layer of the model, or the pages differ in device or
            dtype.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: LayoutPlan,
        storage: TorchStorage,
        network: Network | None = None,
        decoding: MakeDecoding | None = None,
    ) -> None:
        """Without a ``network`` the family's fastest one is made, which takes the weights over.

        With ``decoding`` batches of single tokens go through a :class:`DecodeRunner` of their own.
        """
        self._loaded = loaded
        self._plan = plan
        self._storage = storage
        self._layers = tuple(_pages(spec, plan, storage) for spec in loaded.specs)
        for spec, layer in zip(loaded.specs, self._layers, strict=True):
            if layer.device != loaded.device or layer.dtype != loaded.dtype:
                raise AttentionInputError(
                    f"layer {spec.layer_id}: expected pages in {loaded.dtype} on {loaded.device} "
                    "like the "
                    f"model, got {layer.dtype} on {layer.device}"
                )
        self._geometries = tuple(
            self._geometry(group.id, group.layer_ids[0]) for group in plan.layer_groups
        )
        self._network = network_of(loaded) if network is None else network
        self._scratch = Scratch(torch.empty(0, dtype=loaded.dtype, device=loaded.device))
        self._decode: DecodeRunner | None = None
        if decoding is not None:
            made = decoding(self._layers, self._geometries)
            self._decode = DecodeRunner(self._layers, self._geometries, made)

    def _geometry(self, group: int, layer_id: int) -> GroupGeometry:
        spec = next(spec for spec in self._plan.specs if spec.layer_id == layer_id)
        pool_group = self._plan.layer_groups[group].pool_group
        return GroupGeometry(
            tokens_per_block=self._plan.tokens_per_block,
            window=self._plan.layer_groups[group].life_cycle.window,
            sink_tokens=spec.sink_tokens,
            num_slots=len(self._storage.pool_bytes(pool_group, 0)),
            block_bytes=spec.bytes_per_token * self._plan.tokens_per_block,
        )

    def _numbered(self) -> enumerate[GroupGeometry]:
        return enumerate(self._geometries)

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute the new tokens of every sequence and store their keys and values.

        Returns:
            float32 ``[number of wants_logits, vocab_size]`` on the model's device: for each such
            slice, in batch order, the logits of its last position.

        Raises:
            AttentionInputError: the batch is inconsistent with the plan or the pool; nothing was
                computed.
        """
        check_batch(batch, self._geometries)
        if self._decode is not None and self._decode.accepts(batch):
            self._clear_fresh([begun_slots(batch, g, part) for g, part in self._numbered()])
            return self._decode.forward(batch)
        flat = order(batch)
        pieces = [batch[index] for index in flat]
        device = self._loaded.device
        like = torch.empty(0, dtype=self._loaded.dtype, device=device)
        groups = tuple(
            plan_group(pieces, group, geometry, like) for group, geometry in self._numbered()
        )
        self._clear_fresh([step.fresh_slots for step in groups])
        tokens = np.concatenate([piece.tokens for piece in pieces])
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
        context = StepContext(self._layers, groups, len(tokens), self._scratch)
        rows = torch.from_numpy(self._logit_rows(batch, flat, pieces)).to(device)
        return self._network(
            torch.from_numpy(tokens.astype(np.int64)).to(device),
            torch.from_numpy(positions).to(device),
            context,
            rows,
        )

    @staticmethod
    def _logit_rows(
        batch: Sequence[SequenceSlice], flat: Sequence[int], pieces: Sequence[SequenceSlice]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Flat row of the last token of each slice that wants logits, in batch order."""
        last_rows = np.cumsum([len(piece.tokens) for piece in pieces]) - 1
        by_index = dict(zip(flat, last_rows, strict=True))
        return np.array(
            [by_index[i] for i, piece in enumerate(batch) if piece.wants_logits], np.int64
        )

    def _clear_fresh(self, fresh: Sequence[tuple[int, ...]]) -> None:
        """Zero slots that are begun and not filled: their tails are read under a mask, and 0 * NaN
        is NaN.
        """
        for group, slots in zip(self._plan.layer_groups, fresh, strict=True):
            for pool in range(len(group.slot_bytes)) if slots else ():
                pages = self._storage.pool_bytes(group.pool_group, pool)
                for slot in slots:
                    pages[slot].zero_()


def _pages(spec: KVCacheLayerSpec, plan: LayoutPlan, storage: TorchStorage) -> LayerPages:
    try:
        group = plan.layer_group_of(spec.layer_id)
    except KeyError as error:
        raise AttentionInputError(
            f"the layout plan has no layer {spec.layer_id} of the model"
        ) from error
    return LayerPages(storage.kv(spec.layer_id), group.id)
