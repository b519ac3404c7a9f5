"""transformers' attention over keys and values as float8 pages hold them, and checkpoints that say
with which scales.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ROUNDED: Final = "pageferry_rounded_kv"
WEIGHTS: Final = "model.safetensors"


def round_kv(module: Any, scales: torch.Tensor) -> Any:
    """Have a transformers causal model round its keys and values by ``scales`` ``[layers, 2,
    num_kv_heads]``.
    """
    for layer, own in zip(module.base_model.layers, scales, strict=True):
        layer.self_attn.kv_rounding = own
    module.set_attn_implementation(ROUNDED)
    return module


def rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys or values ``[batch, num_kv_heads, tokens, head_dim]`` by scales ``[num_kv_heads]``."""
    scale = scales[:, None, None].double()
    held = (rows.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (held.double() * scale).to(rows.dtype)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **more: Any,
) -> Any:
    keys, values = module.kv_rounding
    return sdpa_attention_forward(
        module, query, rounded(key, keys), rounded(value, values), *rest, **more
    )


AttentionInterface.register(ROUNDED, _attention)
AttentionMaskInterface.register(ROUNDED, sdpa_mask)


def with_tensors(model: Path, target: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint of one file with more tensors in it."""
    shutil.copytree(model, target)
    save_file({**load_file(target / WEIGHTS), **tensors}, target / WEIGHTS, {"format": "pt"})
    return target
