"""Models for tests: tiny random ones of every family, and the one real small model.

Tiny models have a vocabulary of 288 (the bytes and some special tokens), odd head counts and
windows smaller than a prompt, so that grouped heads and windows are always exercised. They are
written as Hugging Face directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services import default_model

TEST_MODEL: Final = "PAGEFERRY_TEST_MODEL"
"""Path of a GGUF file or directory that stands in for the default model in tests."""

VOCAB: Final = 288
SPECIALS: Final = ("<s>", "</s>", "<|user|>", "<|assistant|>")
WINDOW: Final = 24

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.3,
}

FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "qwen2": lambda: transformers.Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **_COMMON,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
}
"""transformers model type -> configuration of a tiny model of it."""

_WITHOUT_HEAD_DIM: Final = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "hidden_size": 96,
}
_TYPES: Final = ["sliding_attention", "full_attention", "sliding_attention"]

OTHER_FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "cohere2": lambda: transformers.Cohere2Config(
        **_COMMON, sliding_window=WINDOW, layer_types=_TYPES, logit_scale=0.5
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **_COMMON, sliding_window=WINDOW, layer_types=_TYPES
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON,
        sliding_window=WINDOW,
        layer_types=_TYPES,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "glm4": lambda: transformers.Glm4Config(
        **_COMMON,
        attention_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_TYPES,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_WITHOUT_HEAD_DIM,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_WITHOUT_HEAD_DIM),
    "phi3": lambda: transformers.Phi3Config(**_WITHOUT_HEAD_DIM, sliding_window=WINDOW),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_WITHOUT_HEAD_DIM,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        qkv_bias=True,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **_WITHOUT_HEAD_DIM, no_rope_layers=[1, 0, 1], use_sliding_window=False
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **_WITHOUT_HEAD_DIM, sliding_window=WINDOW, use_bias=True
    ),
}
"""Families of the general rule: what each has beside the others is in its tiny model."""


def write_tiny_model(family: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a random model of ``family`` with its tokenizer to ``directory / family`` and return
    that path.
    """
    config = (FAMILIES | OTHER_FAMILIES)[family]()
    path = write_random_model(config, directory / family, seed=seed)
    tiny_tokenizer().save_pretrained(path)
    return path


def write_random_model(config: Any, path: Path, *, seed: int = 0) -> Path:
    """Write a random model, its biases random too, without a tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", ".sinks")):
                torch.nn.init.normal_(parameter, std=config.initializer_range)
    model.save_pretrained(path)
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, four special tokens, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[1]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def real_model_path() -> Path | None:
    """The small real model, when this machine has it: named by environment, else the default
    one.
    """
    named = os.environ.get(TEST_MODEL)
    return Path(named) if named else default_model.find()
