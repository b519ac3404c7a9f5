"""Scales of float8 keys and values as checkpoints name them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from worker.model.errors import ModelLoadError
from worker.model.kv_scales import is_scale, scales_of
from worker.model.quantisation import without_kv_scheme

KEYS, VALUES = (0,), (1,)
NAMES = {
    "self_attn.k_scale": KEYS,
    "self_attn.attn.v_scale": VALUES,
    "self_attn.k_proj.k_scale": KEYS,
    "self_attn.v_proj.v_scale": VALUES,
    "self_attn.k_proj.output_scale": KEYS,
    "self_attn.v_proj.output_scale": VALUES,
    "self_attn.kv_scale": (0, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_checkpoints_use(name: str) -> None:
    whole = f"model.layers.1.{name}"
    assert is_scale(whole)
    found = scales_of({whole: torch.tensor([1.5], dtype=torch.bfloat16)}, 3, 2)
    expected = torch.ones(3, 2, 2)
    expected[1, list(NAMES[name])] = 1.5
    assert torch.equal(found.values, expected)
    assert found.values.dtype == torch.float32
    assert found.given == 1


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_scale",
        "model.layers.1.mlp.up_proj.output_scale",
        "model.layers.1.self_attn.k_proj.v_scale",
        "model.layers.1.self_attn.k_proj.weight_scale",
    ],
)
def test_other_names_are_none_of_them(name: str) -> None:
    assert not is_scale(name)
    assert scales_of({name: torch.tensor(1.5)}, 3, 2).given == 0


def test_a_rank_has_those_of_its_heads() -> None:
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = scales_of({"model.layers.0.self_attn.k_scale": scales[:, None, None]}, 1, 4)
    part = found.of_heads(range(1, 3), torch.device("cpu"))
    assert torch.equal(part, torch.tensor([[[0.2, 0.3], [1.0, 1.0]]]))
    assert part.is_contiguous()


def test_peers_tell_scales_apart() -> None:
    one = {"model.layers.0.self_attn.k_scale": torch.tensor(1.5)}
    other = {"model.layers.0.self_attn.v_scale": torch.tensor(1.5)}
    texts = [scales_of(tensors, 2, 2).text for tensors in ({}, one, dict(one), other)]
    assert texts[1] == texts[2]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"layers.3.self_attn.k_scale": torch.tensor(1.0)}, "layer below 3"),
        ({"layers.0.self_attn.k_scale": torch.ones(3)}, r"each of 2 kv heads, got \[3\]"),
        ({"layers.0.self_attn.k_scale": torch.tensor(0.0)}, "positive, finite"),
        ({"layers.0.self_attn.k_scale": torch.tensor(-1.0)}, "positive, finite"),
        ({"layers.0.self_attn.k_scale": torch.tensor(float("nan"))}, "positive, finite"),
        (
            {
                "layers.0.self_attn.k_scale": torch.tensor(1.0),
                "layers.0.self_attn.k_proj.k_scale": torch.tensor(2.0),
            },
            "got two that differ",
        ),
    ],
)
def test_scales_that_do_not_fit(tensors: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ModelLoadError, match=match):
        scales_of(tensors, 3, 2)


FP8 = {"type": "float", "num_bits": 8}


def quantised(**scheme: Any) -> Any:
    config = transformers.LlamaConfig()
    config.quantization_config = scheme
    return config


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8, "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": FP8,
            "config_groups": {"group_0": {"targets": ["re:.*self_attn$"], "weights": None}},
        },
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": None},
        {"quant_method": "modelopt", "kv_cache_scheme": FP8},
    ],
)
def test_a_scheme_of_the_kv_cache_alone_is_no_matter_of_the_weights(scheme: Any) -> None:
    config = quantised(**scheme)
    assert "quantization_config" not in without_kv_scheme(config).to_dict()
    assert config.quantization_config == scheme
    plain = transformers.LlamaConfig()
    assert without_kv_scheme(plain) is plain


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ({"quant_method": "gptq", "bits": 4}, "weights quantised by gptq"),
        (
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": FP8,
                "config_groups": {"group_0": {"weights": FP8}},
            },
            "weights quantised by compressed-tensors",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weights quantised by modelopt"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {**FP8, "type": "int"}},
            "KV cache scheme of int in 8 bits",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "scheme of nvfp4"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(scheme: Any, match: str) -> None:
    with pytest.raises(ModelLoadError, match=match):
        without_kv_scheme(quantised(**scheme))
