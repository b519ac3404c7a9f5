"""The forward pass of a mixed batch: prefill chunks and single-token decodes of many sequences in
one flat row.

The runner owns no state but reused buffers and the tokens drawn last: which slots a step reads and
writes is in its batch, the pages are the storage's. One thread uses a runner. Behind a forward on
the device's stream the keys and values of every new token are in the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from kvcache_core.storage.types import TORCH_TYPES
from worker.model.backend import BackendMaker, PagedLayers, backend_of
from worker.model.decode import DecodeRunner
from worker.model.errors import AttentionInputError
from worker.model.feed import TokenFeed
from worker.model.idle_step import IdleStep
from worker.model.loader import LoadedModel
from worker.model.networks import Network, network_of
from worker.model.step import SequenceSlice, check_batch, order
from worker.upload import upload

MakeDecode = Callable[[PagedLayers, TokenFeed], DecodeRunner]

MOST_DRAWS: Final = 1024
"""Draws of a step that another can go on from, unless said otherwise."""

__all__ = ["ModelRunner", "SequenceSlice"]


class ModelRunner:
    """Runs one loaded model over one rank's pages.

    Raises:
        AttentionInputError: the plan lacks a layer of the model, or the pages differ in device or
            dtype from what the model's specs say.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: LayoutPlan,
        storage: TorchStorage,
        network: Network | None = None,
        backend: BackendMaker = backend_of,
        decoding: MakeDecode | None = None,
        most_draws: int = MOST_DRAWS,
    ) -> None:
        """Without a ``network`` the family's fastest one is made, which takes the weights over.

        ``backend`` makes the attention backend, ``decoding`` what batches of single tokens go
        through where it accepts them; mixed batches must not rely on cleared pages then.
        ``most_draws`` of a step are kept for the step behind it.
        """
        layers = PagedLayers(
            plan,
            storage,
            loaded.specs,
            loaded.dtype,
            scales=loaded.own_kv_scales,
            head_sinks=loaded.facts.head_sinks,
        )
        for spec in loaded.specs:
            layers.group_of(spec)
            pages, dtype = storage.kv(spec.layer_id), TORCH_TYPES[spec.dtype]
            if storage.device != loaded.device or pages.dtype != dtype:
                raise AttentionInputError(
                    f"layer {spec.layer_id}: expected pages in {dtype} on {loaded.device} "
                    f"for the model, got {pages.dtype} on {storage.device}"
                )
        self._device = loaded.device
        self._idle = IdleStep([storage.kv(spec.layer_id) for spec in loaded.specs])
        self._geometries = layers.geometries
        self._backend = backend(layers)
        self._ranks = loaded.ranks
        self.feed = TokenFeed(most_draws, loaded.device)
        self._decode = None if decoding is None else decoding(layers, self.feed)
        self._network = network_of(loaded) if network is None else network

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
        is_fed = any(piece.feed >= 0 for piece in batch)
        if is_fed and self._ranks.shard.size > 1:
            self.feed.take_from_leader(self._ranks)
        if self._decode is not None and self._decode.accepts(batch):
            return self._decode.forward(batch)
        check_batch(batch, self._geometries)
        flat = order(batch)
        pieces = [batch[index] for index in flat]
        context = self._backend.begin(pieces)
        numbers = [
            np.concatenate([piece.tokens for piece in pieces]).astype(np.int64),
            np.concatenate([np.arange(piece.start, piece.end) for piece in pieces]),
            self._logit_rows(batch, flat, pieces),
        ]
        if is_fed:
            numbers.append(np.repeat([p.feed for p in pieces], [len(p.tokens) for p in pieces]))
        tokens, positions, rows, *feeds = upload(numbers, self._device)
        if feeds:
            tokens = self.feed.filled(tokens, feeds[0])
        return self._network(tokens, positions, context, rows)

    def forget(self) -> None:
        """Owners of sequences (``SequenceSlice.owner``) mean others from now on."""
        self._backend.forget()

    def capture_decodes(self) -> None:
        """Capture the decode steps there are to capture, before anybody waits for one. All ranks
        do so at once.
        """
        if self._decode is not None:
            self._decode.capture_all()

    @torch.inference_mode()
    def idle(self) -> torch.Tensor:
        """Go through the layers with one row of no sequence, because other ranks go through theirs.
        No page is read or written. Returns no logits: float32 ``[0, vocab_size]``.
        """
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._network(nothing, nothing, self._idle, nothing[:0])

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
