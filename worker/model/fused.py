"""Decoder layers of the hot families with fused projections and few, large calls.

Computes what transformers' Llama, Mistral, Qwen 2 and Qwen 3 modules compute (a test holds them
equal): one product for queries, keys and values, one for gate and up, rotary embedding in place in
the product's output, so that new keys and values are written to the pages with one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import rms_norm

from worker.model.attention import AttentionStep
from worker.model.families import ModelFacts
from worker.model.products import Product, fused
from worker.model.rank_sum import RankSum, summed

FUSED_FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer. ``head_norm`` is ``[query and key heads, head_dim]`` where there is
    one.
    """

    index: int
    input_norm: torch.Tensor
    qkv: Product
    head_norm: torch.Tensor | None
    output: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product
    activation: Any
    scale: float


class FusedDecoder:
    """The decoder of one loaded module of :data:`FUSED_FAMILIES`.

    Takes the layers' weights over: the module itself may not be able to run afterwards.
    """

    def __init__(self, module: Any, facts: ModelFacts, ranks: RankSum) -> None:
        model = module.base_model
        self._embedding: torch.Tensor = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._norm: torch.Tensor = model.norm.weight
        self._eps: float = module.config.rms_norm_eps
        self._facts = facts
        self._layers = tuple(
            _fused_layer(index, layer, facts, ranks) for index, layer in enumerate(model.layers)
        )

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of ``rows`` after the last layer and the final norm: ``[len(rows),
        hidden]``.

        The other rows leave the last layer once their keys and values are stored.
        """
        hidden = nn.functional.embedding(tokens, self._embedding)
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == roll(x) * (-sin, sin)
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        rotary = (cos.squeeze(0).unsqueeze(1), signed_sin.squeeze(0).unsqueeze(1))
        *others, last = self._layers
        for layer in others:
            hidden = self._mixed(layer, hidden, self._attended(layer, hidden, rotary, context))
        found = self._attended(last, hidden, rotary, context)
        hidden = self._mixed(last, hidden.index_select(0, rows), found.index_select(0, rows))
        return self._normed(hidden, self._norm)

    def _attended(
        self,
        layer: FusedLayer,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: AttentionStep,
    ) -> torch.Tensor:
        """Store the rows' keys and values and attend: ``[T, num_heads * head_dim]``."""
        facts = self._facts
        dim, kv_heads, num_rows = facts.head_dim, facts.num_kv_heads, len(hidden)
        qkv = layer.qkv(self._normed(hidden, layer.input_norm))
        heads = qkv.view(num_rows, -1, dim)
        query_key = heads[:, : facts.num_heads + kv_heads]
        if layer.head_norm is not None:
            normed = rms_norm(query_key, (dim,), None, self._eps)
            query_key.copy_(normed * layer.head_norm)
        cos, signed_sin = rotary
        rolled = query_key.roll(dim // 2, -1)
        torch.addcmul(query_key * cos, rolled, signed_sin, out=query_key)
        return context.attend(
            layer.index,
            heads[:, : facts.num_heads],
            heads[:, facts.num_heads :].unflatten(1, (2, kv_heads)),
            layer.scale,
        ).flatten(1)

    def _mixed(self, layer: FusedLayer, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, row by row."""
        hidden = layer.output.added_to(hidden, found)
        gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, 1)
        return layer.down.added_to(hidden, layer.activation(gate).mul_(up))

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, (hidden.shape[-1],), weight, self._eps)


def _fused_layer(index: int, layer: Any, facts: ModelFacts, ranks: RankSum) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if facts.family == "qwen3":
        head_norm = torch.cat(
            (
                attention.q_norm.weight.expand(facts.num_heads, -1),
                attention.k_norm.weight.expand(facts.num_kv_heads, -1),
            )
        )
    return FusedLayer(
        index=index,
        input_norm=layer.input_layernorm.weight,
        qkv=fused((attention.q_proj, attention.k_proj, attention.v_proj)),
        head_norm=head_norm,
        output=summed(fused((attention.o_proj,)), ranks),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=fused((mlp.gate_proj, mlp.up_proj)),
        down=summed(fused((mlp.down_proj,)), ranks),
        activation=mlp.act_fn,
        scale=attention.scaling,
    )
