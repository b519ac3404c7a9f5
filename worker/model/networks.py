"""One forward of the network, two ways: through transformers' module, or through fused layers.

Both take the flat batch and give float32 logits of the rows asked for. The plain way serves every
family transformers knows and is what the fused one is checked against.
"""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override

from worker.model.attention import AttentionStep
from worker.model.fused import FUSED_FAMILIES, TORCH_PARTS, FusedDecoder, LayerParts
from worker.model.loader import LoadedModel
from worker.model.products import head
from worker.model.rank_sum import SummedModule
from worker.model.row_exchange import GatheredModule
from worker.model.shard import MLP, SUMMED


class Network(Protocol):
    """Token ids and positions ``[T]`` in, logits ``[len(rows), vocab]`` out."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor: ...


def network_of(loaded: LoadedModel) -> Network:
    """The faster way that this model's family has."""
    if loaded.facts.family in FUSED_FAMILIES:
        return FusedModel(loaded)
    return PlainModel(loaded)


class PlainModel(Network):
    """transformers' own forward with our attention."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._module = loaded.module
        if loaded.ranks.shard.size > 1:
            _add_up_rows(loaded)
        if loaded.ranks.shard.dp_size > 1:
            _gather_rows(loaded)
        self._vocab_size = loaded.vocab_size

    @override
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        arguments = {
            "input_ids": tokens.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "use_cache": False,
            "paged": context,
        }
        if not len(rows):
            self._module.base_model(**arguments)
            return torch.empty((0, self._vocab_size), device=tokens.device)
        return self._module(logits_to_keep=rows, **arguments).logits[0].float()


def _add_up_rows(loaded: LoadedModel) -> None:
    """Have every module of transformers that gives a part of a sum give the sum over all ranks."""
    rows = [
        name
        for name, _ in loaded.module.named_modules()
        if loaded.shard_plan.cut_of(name) in SUMMED
    ]
    for name in rows:
        part = loaded.module.get_submodule(name)
        loaded.module.set_submodule(name, SummedModule(part, loaded.ranks))


def _gather_rows(loaded: LoadedModel) -> None:
    """Have every MLP of transformers compute the rows of all ranks."""
    for layer in loaded.module.base_model.layers:
        mlp = layer.get_submodule(MLP)
        layer.set_submodule(MLP, GatheredModule(mlp, loaded.ranks.layer_rows))


class FusedModel(Network):
    """Fused layers, which take the module's weights over."""

    def __init__(self, loaded: LoadedModel, parts: LayerParts = TORCH_PARTS) -> None:
        self._decoder = FusedDecoder(loaded.module, loaded.facts, loaded.ranks, parts)
        self._head = head(loaded.module.get_output_embeddings(), self._decoder.norm, parts.product)

    @override
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        hidden = self._decoder(tokens, positions, context, rows)
        return self._head.normed(hidden, self._decoder.norm).float()
