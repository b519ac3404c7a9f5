"""Families of the general rule: what can be paged equals transformers, what cannot is refused by
name before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.devices import DEVICES, usable
from tests.support.models import FAMILIES, OTHER_FAMILIES
from tests.worker.model.harness import PagedModel
from worker.model.backend import triton_backend
from worker.model.errors import AttentionInputError, ModelLoadError
from worker.model.families import KNOWN_FAMILIES, describe
from worker.model.inspection import check_tokens_alone, inspect_family
from worker.model.loader import load_model

TinyModel = Callable[[str], Path]
TOLERANCE = {"cpu": 2e-4, "cuda": 2e-3}


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_logits(
    tiny_model: TinyModel, reference: Callable[[Path], Any], family: str, device: str
) -> None:
    """A prompt, chunks over a cached prefix, single tokens, and batches of all of them."""
    path = tiny_model(family)
    paged = PagedModel(path, device=usable(device))
    steps: list[dict[str, list[int]]] = [
        {"a": tokens(37, 1), "b": tokens(1, 2)},
        {"b": tokens(30, 3), "a": tokens(1, 4)},
        {"a": tokens(1, 5), "c": tokens(9, 6), "b": tokens(13, 7)},
        *({name: tokens(1, 10 + count) for name in "cab"} for count in range(9)),
    ]
    found = []
    for step in steps:
        rows = paged.feed(**step)
        found += [
            (name, len(paged.tokens[name]), row) for name, row in zip(step, rows, strict=True)
        ]
    with torch.inference_mode():
        whole = {
            name: reference(path)(torch.tensor([text])).logits[0]
            for name, text in paged.tokens.items()
        }
    for name, length, row in found:
        torch.testing.assert_close(row, whole[name][length - 1], atol=TOLERANCE[device], rtol=0)


@pytest.mark.parametrize("family", sorted(KNOWN_FAMILIES))
def test_known_families_would_pass_the_inspection(family: str) -> None:
    config = FAMILIES[family]()
    facts = describe(config.to_dict())
    assert inspect_family(config, facts) == facts


def test_only_what_the_module_knows_is_added() -> None:
    config = OTHER_FAMILIES["gpt_oss"]()
    facts = describe(config.to_dict())
    assert not facts.head_sinks
    assert inspect_family(config, facts).head_sinks


def test_kernels_without_sinks_refuse_them(tiny_model: TinyModel) -> None:
    paged = PagedModel(tiny_model("gpt_oss"), backend=triton_backend)
    with pytest.raises(AttentionInputError, match="expected no sinks of heads"):
        paged.feed(a=[1, 2, 3])


SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
HIDDEN = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**SMALL, **changes)


def gemma2(**changes: Any) -> Any:
    return transformers.Gemma2Config(**SMALL, head_dim=16, **changes)


def bert() -> Any:
    return transformers.BertConfig(vocab_size=32, hidden_size=32, num_attention_heads=2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an encoder with a decoder": (transformers.T5Config, "an encoder with a decoder"),
    "speech": (transformers.WhisperConfig, "an encoder with a decoder"),
    "cross attention": (lambda: llama(add_cross_attention=True), "cross attention"),
    "cross attention and images": (transformers.MllamaConfig, "text-only variant, mllama_text_mod"),
    "images": (transformers.Gemma3Config, "text-only variant, gemma3_text"),
    "images only": (transformers.CLIPVisionConfig, "no causal language model of it"),
    "a state": (lambda: transformers.MambaConfig(**HIDDEN), "carry a state from token to token"),
    "a state beside attention": (
        lambda: transformers.FalconH1Config(**SMALL),
        "carry a state from token to token",
    ),
    "linear attention": (
        lambda: transformers.Qwen3NextConfig(**SMALL),
        "layer 0 has type 'linear_attention'",
    ),
    "convolutions": (lambda: transformers.Lfm2Config(**SMALL, full_attn_idxs=[1]), "type 'conv'"),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(**SMALL),
        "layer 0 has type 'chunked_attention'",
    ),
    "latent attention": (transformers.DeepseekV3Config, r"latent attention \(MLA, kv_lora_rank"),
    "learned positions": (transformers.GPT2Config, "positions are not rotary"),
    "a bias of scores": (transformers.BloomConfig, "a bias of scores"),
    "both ways": (bert, "sees later tokens"),
    "both ways by its configuration": (lambda: llama(is_causal=False), "sees later tokens"),
    "both ways by its module": (
        lambda: transformers.BertGenerationConfig(
            **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        "layer 0 does not see the tokens before it",
    ),
    "attention of its own": (
        lambda: transformers.FalconConfig(
            **HIDDEN,
            num_attention_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1},
        ),
        "does not go through transformers' attention interface",
    ),
    "a mask of its own": (
        lambda: transformers.DogeConfig(**SMALL),
        "layer 0 does not see the tokens before it",
    ),
    "two attentions a layer": (
        lambda: transformers.DiffLlamaConfig(**SMALL),
        "once in each of 2 layers, it is asked 4 times",
    ),
    "keys unlike values": (
        lambda: transformers.MiMoV2FlashConfig(**SMALL),
        "layer 0: expected 2 heads and 2 kv heads",
    ),
    "unknown rotary scaling": (
        lambda: transformers.Phi3Config(
            **SMALL,
            pad_token_id=0,
            max_position_embeddings=64,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        ),
        "rotary scaling 'longrope' is not supported",
    ),
    "quantised weights": (
        lambda: gemma2(quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised by gptq",
    ),
}


@pytest.mark.parametrize(("config", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_weights_are_read(
    tmp_path: Path, config: Callable[[], Any], why: str
) -> None:
    config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match=why):
        load_model(tmp_path)


def test_a_family_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="unheard_of"):
        load_model(tmp_path)


class TestTokensAlone:
    """A loaded module in which tokens see each other beside attention is refused."""

    @pytest.fixture
    def module(self, tiny_model: TinyModel) -> Any:
        return load_model(tiny_model("starcoder2")).module

    def check(self, module: Any) -> None:
        check_tokens_alone(module, describe(module.config.to_dict()))

    def test_they_do_not(self, module: Any) -> None:
        self.check(module)

    def test_a_convolution_over_tokens(self, module: Any) -> None:
        def mix(_module: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
            return found + 0.5 * torch.nn.functional.pad(found, (0, 0, 1, 0))[:, :-1]

        module.model.layers[1].mlp.register_forward_hook(mix)
        with pytest.raises(ModelLoadError, match="see each other beside attention"):
            self.check(module)

    def test_positions_counted_by_the_module(self, module: Any) -> None:
        def count(_module: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
            rows, width = found.shape[1:]
            return found + torch.outer(torch.arange(rows), torch.linspace(-1, 1, width))

        module.model.embed_tokens.register_forward_hook(count)
        with pytest.raises(ModelLoadError, match="do not keep their positions"):
            self.check(module)

    def test_no_number(self, module: Any) -> None:
        with torch.no_grad():
            module.model.norm.weight.fill_(float("nan"))
        with pytest.raises(ModelLoadError, match="differ by nan"):
            self.check(module)
