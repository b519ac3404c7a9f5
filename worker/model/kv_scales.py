"""Scales of float8 keys and values, as checkpoints carry them: a stored number times its scale is
the key or value.

There is one number a layer, or one a kv head, under the names of vLLM, compressed-tensors, ModelOpt
(which TensorRT-LLM reads) and Quark. What a checkpoint lacks is 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from worker.model.errors import ModelLoadError

SCALE_NAME: Final = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\."
    r"(?:attn\.)?(k_scale|v_scale|kv_scale|k_proj\.k_scale|v_proj\.v_scale"
    r"|k_proj\.output_scale|v_proj\.output_scale)"
)
KEY, VALUE = 0, 1


@dataclass(frozen=True, eq=False)
class KVScales:
    """Those of a whole model: float32 ``[layers, 2, num_kv_heads]`` on CPU, keys before values."""

    values: torch.Tensor
    given: int
    """Layers with a scale in the checkpoint."""

    def of_heads(self, heads: range, device: torch.device) -> torch.Tensor:
        """Those of some kv heads, contiguous, on a device: float32 ``[layers, 2, len(heads)]``."""
        return self.values[:, :, heads.start : heads.stop].contiguous().to(device)

    @property
    def text(self) -> str:
        """Granularity, type and digest: peers whose scales differ read each other's pages wrong."""
        digest = hashlib.sha256(self.values.numpy().tobytes()).hexdigest()
        return f"a layer and head, float32, sha256 {digest[:16]}"


def is_scale(name: str) -> bool:
    """Whether this is the name of such a scale, which is no weight of the model."""
    return SCALE_NAME.fullmatch(name) is not None


def read_scales(files: Sequence[Path], num_layers: int, num_kv_heads: int) -> KVScales:
    """The scales in safetensors files. Raises ModelLoadError for those that do not fit."""
    found: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if is_scale(name)]  # noqa: SIM118  # no mapping
            found |= {name: file.get_tensor(name) for name in names}
    return scales_of(found, num_layers, num_kv_heads)


def scales_of(tensors: Mapping[str, torch.Tensor], num_layers: int, num_kv_heads: int) -> KVScales:
    """The scales among tensors by their names in a checkpoint.

    Raises:
        ModelLoadError: a layer that the model does not have, a shape that is neither one number nor
            one a kv head, a number that is not positive and finite, two that contradict each other.
    """
    values = torch.ones(num_layers, 2, num_kv_heads)
    known: dict[tuple[int, int], str] = {}
    for name, tensor in sorted(tensors.items()):
        match = SCALE_NAME.fullmatch(name)
        if match is None:
            continue
        layer = int(match[1])
        if layer >= num_layers:
            raise ModelLoadError(f"{name}: expected a layer below {num_layers}")
        scale = _checked(name, tensor, num_kv_heads)
        for kind in _kinds(match[2]):
            other = known.setdefault((layer, kind), name)
            if other != name and not torch.equal(values[layer, kind], scale):
                raise ModelLoadError(f"{name} and {other}: expected one scale, got two that differ")
            values[layer, kind] = scale
    return KVScales(values, len({layer for layer, _ in known}))


def _kinds(suffix: str) -> Iterable[int]:
    if suffix == "kv_scale":
        return KEY, VALUE
    return (KEY,) if suffix.startswith("k_") else (VALUE,)


def _checked(name: str, tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """float32 ``[num_kv_heads]``."""
    flat = tensor.reshape(-1).float()
    if len(flat) not in {1, num_kv_heads}:
        raise ModelLoadError(
            f"{name}: expected one scale, or one for each of {num_kv_heads} kv heads, got "
            f"{list(tensor.shape)}"
        )
    if not (flat.isfinite() & (flat > 0)).all():
        raise ModelLoadError(f"{name}: expected positive, finite scales, got {flat.tolist()}")
    return flat.expand(num_kv_heads)
