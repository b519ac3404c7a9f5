"""GGUF files of each architecture, made from tiny models the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file

from worker.model.errors import ModelLoadError
from worker.model.families import describe
from worker.model.gguf_model import (
    GEMMA_LAYERS,
    IN_LAYERS,
    OUTSIDE_LAYERS,
    configuration,
    state_dict,
)
from worker.model.loader import load_model
from worker.model.shard import Shard, ShardPlan
from worker.model.source import locate

TinyModel = Callable[[str], Path]
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
HEADS = {"q": 6, "k": 2}


def write_gguf(
    model: Path,
    family: str,
    target: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Write a tiny model as one GGUF file; matrices in ``kind``."""
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6 if family == "gemma3_text" else 10_000.0)
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(256)
    if family == "gemma3_text":
        writer.add_sliding_window(24)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    layers = GEMMA_LAYERS if family == "gemma3_text" else IN_LAYERS
    names = {theirs: ours for ours, theirs in OUTSIDE_LAYERS.items()}
    for layer in range(3):
        for ours, theirs in layers.items():
            for part in ("weight", "bias"):
                names[f"model.layers.{layer}.{theirs}.{part}"] = f"blk.{layer}.{ours}.{part}"
    tensors = {
        names[name]: converted(family, names[name], value.numpy())
        for name, value in load_file(model / "model.safetensors").items()
    }
    for name, values in {**tensors, **(extra or {})}.items():
        quantised = values.ndim == 2 and values.shape[1] % 32 == 0
        used = kind if quantised else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def converted(family: str, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to some weights."""
    values = np.ascontiguousarray(values, np.float32)
    if family == "gemma3_text" and name.endswith("norm.weight"):
        return values + 1
    for part, heads in HEADS.items():
        if family == "llama" and f".attn_{part}." in name:
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def logits(module: Any) -> torch.Tensor:
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        found: torch.Tensor = module(torch.arange(3, 60)[None]).logits
    return found


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_directory(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    changes: dict[str, Any] = {}
    if family == "qwen2":
        changes = {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    if family == "gemma3_text":
        changes = {"layer_types": ["sliding_attention"] * 3}  # the first five of six are
    directory = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(family), **changes)
    path = write_gguf(tiny_model(family), family, tmp_path / "tiny.gguf")
    loaded = load_model(path)
    if family == "gemma3_text":
        loaded.module.config.query_pre_attn_scalar = 16
    assert loaded.facts.family == family
    assert loaded.eos_token_ids == (257,)
    torch.testing.assert_close(logits(loaded.module), logits(directory), atol=1e-5, rtol=1e-5)


def whole_plan() -> ShardPlan:
    config = transformers.LlamaConfig()
    return ShardPlan(Shard(), describe(config.to_dict()), config)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_weights(tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    chosen = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = locate(path).gguf
    assert header is not None
    messages: list[str] = []
    plan = whole_plan()
    (weight,) = state_dict(header, path, None, torch.float32, messages.append, plan).values()
    expected = gguf.quants.dequantize(quantize(values, chosen), chosen).reshape(96, 64)
    assert torch.equal(weight, torch.from_numpy(np.asarray(expected, np.float32)))
    assert messages[-1].startswith("dequantising weights, 0 of 0 MB (100 %)")


def test_windows_scaling_and_factors(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    factors = np.linspace(1, 2, 8, dtype=np.float32)
    path = write_gguf(
        model,
        "llama",
        tmp_path / "scaled.gguf",
        metadata=scaled,
        extra={"rope_freqs.weight": factors},
    )
    loaded = load_model(path)
    assert loaded.module.config.rope_parameters["factor"] == 4.0
    plain = load_model(model).module.base_model.rotary_emb.inv_freq
    found = loaded.module.base_model.rotary_emb.inv_freq
    torch.testing.assert_close(found, plain / 4 / torch.from_numpy(factors))
    assert {spec.window for spec in loaded.specs} == {None}


def test_what_is_missing_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"expected attention\.head_count"):
        load_model(path)
    strange = write_gguf(
        tiny_model("llama"),
        "llama",
        tmp_path / "strange.gguf",
        extra={"blk.0.ffn_exp.weight": np.zeros((4, 4), np.float32)},
    )
    with pytest.raises(ModelLoadError, match=r"unexpected tensor blk\.0\.ffn_exp\.weight"):
        load_model(strange)


@pytest.mark.slow
def test_the_real_model_equals_transformers_reader(real_model: Path) -> None:
    """Every weight and what the configuration computes with; transformers takes 30 s for it."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        **locate(real_model).arguments(), dtype=torch.float32
    )
    ours = load_model(real_model).module
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    header = locate(real_model).gguf
    assert header is not None
    config = configuration(header, real_model).to_dict()
    for key in ("rope_parameters", "rms_norm_eps", "hidden_act", "head_dim", "tie_word_embeddings"):
        assert config[key] == theirs.config.to_dict()[key]


def test_types_that_cannot_be_dequantised_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K][1]), np.uint8)
    writer.add_tensor("output.weight", raw, raw_dtype=GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = locate(path).gguf
    assert header is not None
    with pytest.raises(ModelLoadError, match=r"1 tensors.*output\.weight \(Q8_K\)"):
        state_dict(header, path, None, torch.float32, print, whole_plan())
