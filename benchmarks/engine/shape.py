"""A Llama-shaped model of random weights, made on the device, and the pages for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import nn

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType
from kvcache_core.storage import TorchStorage
from worker.model.attention import PAGED
from worker.model.families import describe
from worker.model.loader import LoadedModel, quiet_transformers
from worker.model.rank_sum import OnlyRank
from worker.model.shard import Shard, ShardPlan

TOKENS_PER_BLOCK: Final = 64
ELEMENTS: Final = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the benchmark varies of a Llama configuration; the rest is that of Llama 3 8B."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """Numbers of one head."""
        return self.hidden // self.heads

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each fused matrix."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }

    def weight_bytes(self, element: int) -> int:
        """Bytes of weights that a decode step reads: all but the embedding."""
        sizes = {name: out * inner for name, (out, inner) in self.products.items()}
        head = sizes.pop("head")
        return (self.layers * sum(sizes.values()) + head) * element


def configuration(shape: ModelShape) -> Any:
    """As transformers has it."""
    return transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def make_module(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, attention: str
) -> nn.Module:
    """Random weights, as transformers initialises them, made where they stay."""
    torch.manual_seed(0)
    with quiet_transformers(), device:
        module = transformers.AutoModelForCausalLM.from_config(
            configuration(shape), attn_implementation=attention, dtype=dtype
        )
    made: nn.Module = module.to(device).eval().requires_grad_(requires_grad=False)
    return made


def make_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """As the loader would give it."""
    config = configuration(shape)
    module = make_module(shape, device, dtype, PAGED)
    facts = describe(config.to_dict())
    return LoadedModel(
        module=module,
        facts=facts,
        specs=facts.layer_specs(ELEMENTS[dtype]),
        eos_token_ids=(),
        device=device,
        dtype=dtype,
        whole_facts=facts,
        configuration=config.to_dict(),
        ranks=OnlyRank(),
        shard_plan=ShardPlan(Shard(), facts, config),
    )


def make_pages(loaded: LoadedModel, blocks: int) -> tuple[LayoutPlan, TorchStorage]:
    """``blocks`` blocks that hold random keys and values."""
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=TOKENS_PER_BLOCK)
    storage = TorchStorage(plan, [blocks] * len(plan.pool_groups), loaded.device)
    for spec in loaded.specs:
        storage.kv(spec.layer_id).normal_()
    return plan, storage
