"""A GGUF file as a transformers configuration and a state dict.

transformers reads GGUF itself, but parses the vocabulary several times in Python: 20 s of CPU where
this takes 4, in every worker. Only the families we serve are known here; the rest of a model, its
code included, is transformers' own. Differences to transformers' reader, each what llama.cpp
computes: a window only where the file has one, rotary scaling and frequency factors applied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from worker.model.errors import ModelLoadError
from worker.model.gguf_header import GGUFHeader, GGUFTensor
from worker.model.shard import ShardPlan
from worker.progress import BytesRead, Progress

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how Llama 3.1 and later store their scaling."""

OUTSIDE_LAYERS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYERS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYERS: Final = {
    **IN_LAYERS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

DIRECT: Final = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16})
"""What needs no dequantising."""
CHUNK_BYTES: Final = 1 << 20
"""gguf dequantises 16 rows at a time; rows of about this size / 16 keep its loop short."""


class _Metadata:
    """Values of one file, by key without the architecture's prefix."""

    def __init__(self, header: GGUFHeader, path: Path) -> None:
        self._header = header
        self._path = path

    def find(self, key: str) -> Any:
        """The value, or None."""
        return self._header.metadata.get(f"{self._header.architecture}.{key}")

    def need(self, key: str) -> Any:
        """The value. Raises ModelLoadError."""
        value = self.find(key)
        if value is None:
            raise ModelLoadError(
                f"{self._path}: expected {key} in the GGUF metadata; convert it again"
            )
        return value

    def token(self, name: str) -> Any:
        """Id of a special token, or None."""
        return self._header.metadata.get(f"tokenizer.ggml.{name}_token_id")


def configuration(header: GGUFHeader, path: Path) -> Any:
    """The transformers configuration of a GGUF file of one of our families.

    Raises:
        ModelLoadError: something the configuration needs is not in the file.
    """
    data = _Metadata(header, path)
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{path}: expected a tensor token_embd.weight; convert it again")
    heads = data.need("attention.head_count")
    hidden = data.need("embedding_length")
    kv_heads, head_dim = data.find("attention.head_count_kv"), data.find("attention.key_length")
    common: dict[str, Any] = {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.need("feed_forward_length"),
        "num_hidden_layers": data.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "max_position_embeddings": data.need("context_length"),
        "rms_norm_eps": data.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": data.token("bos"),
        "eos_token_id": data.token("eos"),
        "pad_token_id": data.token("padding"),
    }
    return CONFIGURATIONS[header.architecture](data, header, common)


def _rope(data: _Metadata) -> dict[str, Any]:
    base = data.find("rope.freq_base")
    rope: dict[str, Any] = {
        "rope_theta": 10_000.0 if base is None else base,
        "rope_type": "default",
    }
    kind, factor = data.find("rope.scaling.type"), data.find("rope.scaling.factor")
    if kind in (None, "none") or factor in (None, 0.0, 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    original = data.find("rope.scaling.original_context_length")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return rope


def _llama(data: _Metadata, header: GGUFHeader, common: dict[str, Any]) -> Any:
    window = data.find("attention.sliding_window")
    if window:
        return transformers.MistralConfig(
            **common, sliding_window=window, rope_parameters=_rope(data)
        )
    return transformers.LlamaConfig(
        **common,
        rope_parameters=_rope(data),
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
    )


def _qwen2(data: _Metadata, _header: GGUFHeader, common: dict[str, Any]) -> Any:
    return transformers.Qwen2Config(**common, rope_parameters=_rope(data))


def _qwen3(data: _Metadata, _header: GGUFHeader, common: dict[str, Any]) -> Any:
    return transformers.Qwen3Config(**common, rope_parameters=_rope(data))


def _gemma3(data: _Metadata, _header: GGUFHeader, common: dict[str, Any]) -> Any:
    """Windowed layers have their own, unscaled rotary base; the 27B model its own query scale."""
    largest = common["num_hidden_layers"] == 62
    return transformers.Gemma3TextConfig(
        **common,
        sliding_window=data.need("attention.sliding_window"),
        query_pre_attn_scalar=(
            common["hidden_size"] // common["num_attention_heads"]
            if largest
            else common["head_dim"]
        ),
        rope_parameters={
            "full_attention": _rope(data),
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
    )


CONFIGURATIONS: Final[dict[str, Callable[[_Metadata, GGUFHeader, dict[str, Any]], Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def state_dict(
    header: GGUFHeader,
    path: Path,
    config: Any,
    dtype: torch.dtype,
    progress: Progress,
    plan: ShardPlan,
) -> dict[str, torch.Tensor]:
    """All weights of a rank by transformers' names, dequantised, on CPU. ``config`` is the whole
    model's. Of other ranks' rows nothing is dequantised.

    Raises:
        ModelLoadError: a tensor that this architecture should not have, or types that cannot be
            read.
    """
    _check_kinds(header, path)
    weights: dict[str, torch.Tensor] = {}
    total = sum(tensor.num_bytes for tensor in header.tensors.values())
    read = BytesRead("dequantising weights,", total, progress)
    with path.open("rb") as file:
        data = np.memmap(file, mode="r", dtype=np.uint8, offset=0)
        for name, whole in header.tensors.items():
            if name != ROPE_FACTORS:
                target = _target(header.architecture, name, path)
                tensor, index = whole, plan.part(target, whole.shape)
                if len(index) == 1 and len(whole.shape) == 2:
                    tensor, index = _rows(whole, index[0]), ()
                found = _read(data, header, tensor)[index]
                values = _adapted(header.architecture, name, found, config)
                weights[target] = torch.from_numpy(values).to(dtype, copy=bool(index))
                if not plan.owns(target):
                    weights[target].zero_()
            read.add(whole.num_bytes)
    return weights


def apply_rope_factors(header: GGUFHeader, path: Path, module: Any) -> None:
    """Divide the rotary frequencies of a loaded Llama by the file's factors, if it has any."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return
    factors = torch.from_numpy(_read(np.memmap(path, mode="r", dtype=np.uint8), header, tensor))
    frequencies = module.base_model.rotary_emb.inv_freq
    if header.architecture != "llama" or factors.shape != frequencies.shape:
        raise ModelLoadError(
            f"{path}: expected rotary factors of a Llama, {list(frequencies.shape)}, "
            f"got {list(factors.shape)} in a {header.architecture}"
        )
    frequencies.div_(factors.to(frequencies.device))


def _target(architecture: str, name: str, path: Path) -> str:
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    names = GEMMA_LAYERS if architecture == "gemma3" else IN_LAYERS
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in names:
        raise ModelLoadError(f"{path}: unexpected tensor {name} in a {architecture} GGUF file")
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def _check_kinds(header: GGUFHeader, path: Path) -> None:
    """Whether the installed gguf dequantises everything in the file."""
    foreign = sorted(
        f"{name} ({tensor.kind.name})"
        for name, tensor in header.tensors.items()
        if tensor.kind not in DIRECT and not _is_known(tensor.kind)
    )
    if foreign:
        raise ModelLoadError(
            f"{path}: {len(foreign)} tensors are of types that gguf does not dequantise, such as "
            f"{', '.join(foreign[:3])}; quantise the model to another type, such as Q4_K_M or Q8_0"
        )


def _is_known(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except RuntimeError:  # the kind that says: not yet
        return False
    return True


def _read(
    data: npt.NDArray[np.uint8], header: GGUFHeader, tensor: GGUFTensor
) -> npt.NDArray[np.float32]:
    start = header.data_start + tensor.offset
    raw = data[start : start + tensor.num_bytes]
    if tensor.kind is GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape).copy()
    if tensor.kind is GGMLQuantizationType.F16:
        return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    merged = _merge(rows, tensor.num_bytes // rows)
    values = dequantize(raw.reshape(rows // merged, -1), tensor.kind)
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _rows(tensor: GGUFTensor, rows: slice) -> GGUFTensor:
    """Some rows of a matrix: types pack within a row."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return GGUFTensor(
        shape=(rows.stop - rows.start, *tensor.shape[1:]),
        kind=tensor.kind,
        offset=tensor.offset + rows.start * row_bytes,
        num_bytes=(rows.stop - rows.start) * row_bytes,
    )


def _merge(rows: int, row_bytes: int) -> int:
    """How many rows to read as one: a divisor of ``rows``."""
    wanted = max(1, CHUNK_BYTES // 16 // row_bytes)
    return next(count for count in range(min(wanted, rows), 0, -1) if rows % count == 0)


def _adapted(
    architecture: str, name: str, values: npt.NDArray[np.float32], config: Any
) -> npt.NDArray[np.float32]:
    """Undo what llama.cpp's converter does to weights: rotary pairs in Llama, 1 + w norms in
    Gemma.
    """
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values - 1
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        pairs = values.reshape(-1, config.head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return values
