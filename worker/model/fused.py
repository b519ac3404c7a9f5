"""Decoder layers of the hot families with fused projections and few, large calls.

Computes what transformers' Llama, Mistral, Qwen 2 and Qwen 3 modules compute (a test holds them
equal): one product for queries, keys and values, one for gate and up, rotary embedding in place in
the product's output, so that new keys and values are written to the pages with one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from worker.model.attention import AttentionStep
from worker.model.families import ModelFacts
from worker.model.heads import Angles, HeadRows, Placing, TorchPlacing
from worker.model.products import MakeProduct, Product, RowNorm, fused, make_product
from worker.model.rank_sum import RankSum, summed
from worker.model.row_exchange import RowExchange

FUSED_FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer. ``head_norm`` is ``[query and key heads, head_dim]`` where there is
    one.
    """

    index: int
    input_norm: RowNorm
    qkv: Product
    head_norm: torch.Tensor | None
    output: Product
    mlp_norm: RowNorm
    gate_up: Product
    down: Product
    activation: Any
    rows: RowExchange
    """Around the MLP."""
    scale: float


@dataclass(frozen=True)
class LayerParts:
    """How layers are computed: products of matrices and norms, a placing from a norm's epsilon."""

    product: MakeProduct
    placing: Callable[[float], Placing]


TORCH_PARTS: Final = LayerParts(make_product, TorchPlacing)


class FusedDecoder:
    """The decoder of one loaded module of :data:`FUSED_FAMILIES`.

    Takes the layers' weights over: the module itself may not be able to run afterwards.
    """

    def __init__(
        self,
        module: Any,
        facts: ModelFacts,
        ranks: RankSum,
        parts: LayerParts = TORCH_PARTS,
    ) -> None:
        model = module.base_model
        eps: float = module.config.rms_norm_eps
        self._embedding: torch.Tensor = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._facts = facts
        self._placing = parts.placing(eps)
        last = len(model.layers) - 1
        self._layers = tuple(
            _fused_layer(
                layer,
                _Shared(index, facts, eps, parts.product, ranks),
                ranks.drawn_rows if index == last else ranks.layer_rows,
            )
            for index, layer in enumerate(model.layers)
        )
        self.norm = RowNorm(model.norm.weight, eps)
        """The final norm, which the head's product applies."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of ``rows`` after the last layer, before the final norm: ``[len(rows),
        hidden]``.

        The other rows leave the last layer once their keys and values are stored.
        """
        hidden = nn.functional.embedding(tokens, self._embedding)
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))
        angles = self._placing.angles(cos.squeeze(0), sin.squeeze(0))
        *others, last = self._layers
        for layer in others:
            hidden = _mixed(layer, hidden, self._attended(layer, hidden, angles, context))
        found = self._attended(last, hidden, angles, context.of_drawn())
        return _mixed(last, hidden.index_select(0, rows), found.index_select(0, rows))

    def _attended(
        self, layer: FusedLayer, hidden: torch.Tensor, angles: Angles, context: AttentionStep
    ) -> torch.Tensor:
        """Store the rows' keys and values and attend: ``[T, num_heads * head_dim]``."""
        facts = self._facts
        qkv = layer.qkv.normed(hidden, layer.input_norm)
        rows = HeadRows(
            layer=layer.index,
            heads=qkv.view(len(hidden), -1, facts.head_dim),
            num_query=facts.num_heads,
            num_kv=facts.num_kv_heads,
            norm=layer.head_norm,
            scale=layer.scale,
        )
        return self._placing(rows, angles, context).flatten(1)


def _mixed(layer: FusedLayer, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The rest of a layer, row by row."""
    hidden = layer.rows.gathered(layer.output.added_to(hidden, found))
    gated = layer.gate_up.gated(hidden, layer.mlp_norm, layer.activation)
    return layer.rows.own(layer.down.added_to(hidden, gated))


@dataclass(frozen=True)
class _Shared:
    """What a layer is made with."""

    index: int
    facts: ModelFacts
    eps: float
    make: MakeProduct
    ranks: RankSum


def _fused_layer(layer: Any, given: _Shared, rows: RowExchange) -> FusedLayer:
    index, facts, eps, make = given.index, given.facts, given.eps, given.make
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if facts.family == "qwen3":
        head_norm = torch.cat(
            (
                attention.q_norm.weight.expand(facts.num_heads, -1),
                attention.k_norm.weight.expand(facts.num_kv_heads, -1),
            )
        )
    input_norm = RowNorm(layer.input_layernorm.weight, eps)
    mlp_norm = RowNorm(layer.post_attention_layernorm.weight, eps)
    return FusedLayer(
        index=index,
        input_norm=input_norm,
        qkv=fused((attention.q_proj, attention.k_proj, attention.v_proj), make, input_norm),
        head_norm=head_norm,
        output=_whole_heads(fused((attention.o_proj,), make), given.ranks),
        mlp_norm=mlp_norm,
        gate_up=fused((mlp.gate_proj, mlp.up_proj), make, mlp_norm),
        down=summed(fused((mlp.down_proj,), make), given.ranks),
        activation=mlp.act_fn,
        rows=rows,
        scale=attention.scaling,
    )


def _whole_heads(product: Product, ranks: RankSum) -> Product:
    """Attention's product, summed where ranks share the heads."""
    return product if ranks.shard.attention.size == 1 else summed(product, ranks)
