"""What a model's configuration says about its KV cache.

Everything here reads a transformers configuration and returns values. Any family that transformers
builds is taken; a feature that paged attention does not compute is refused with its name, never
served wrong. What no configuration says is looked for by :mod:`worker.model.inspection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from worker.model.errors import ModelLoadError
from worker.model.pageable import SERVED, SLIDING, Configuration, check_pageable

ROPE_TYPES: Final = frozenset({"default", "linear", "yarn", "llama3"})
"""Rotary scalings that depend on the position alone. ``dynamic`` and ``longrope`` change with the
longest sequence of the batch, so that cached keys would not be reusable.
"""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the cache, the router and the front end must know about a model."""

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Per layer: positions a token sees, itself included; None sees all."""
    vocab_size: int
    max_position_tokens: int
    head_sinks: bool = False
    """Whether every head has a learned score beside those of its keys, as GPT-OSS has."""

    def layer_specs(
        self, dtype: ElementType, owner: KVCacheLayerOwner = KVCacheLayerOwner.TARGET
    ) -> tuple[KVCacheLayerSpec, ...]:
        """Specs of all layers; layer ids are the model's own layer indices."""
        return tuple(
            KVCacheLayerSpec(
                layer_id=layer,
                owner=owner,
                dtype=dtype,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
            )
            for layer, window in enumerate(self.windows)
        )


Windows = tuple[int | None, ...]
"""Per layer, as in :class:`ModelFacts`."""


def _no_windows(config: Configuration) -> Windows:
    return (None,) * int(config["num_hidden_layers"])


def _all_layers_windowed(config: Configuration) -> Windows:
    """One ``sliding_window`` for every layer, or none."""
    window: int | None = config.get("sliding_window")
    return (window,) * int(config["num_hidden_layers"])


def _by_layer_type(config: Configuration) -> Windows:
    """``layer_types`` names each layer (Qwen's follows from max_window_layers)."""
    window: int | None = config.get("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in config["layer_types"])


def _by_what_is_there(config: Configuration) -> Windows:
    """The general rule, which inspection holds the module to."""
    by = _all_layers_windowed if config.get("layer_types") is None else _by_layer_type
    return by(config)


KNOWN_FAMILIES: Final[dict[str, Callable[[Configuration], Windows]]] = {
    "llama": _no_windows,
    "qwen2": _by_layer_type,
    "qwen3": _by_layer_type,
    "mistral": _all_layers_windowed,
    "gemma3_text": _by_layer_type,
    "mixtral": _all_layers_windowed,
    "qwen3_moe": _all_layers_windowed,
}
"""transformers model type -> windows per layer, from what its module reads. These need no
inspection: tests hold each equal to transformers.
"""

GGUF_ARCHITECTURES: Final = frozenset({"llama", "qwen2", "qwen3", "gemma3"})


def check_gguf_architecture(architecture: str) -> None:
    """Raises:
    ModelLoadError: not one that we read; the message names those.
    """
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"GGUF architecture {architecture!r} is not supported; expected one of "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}; other models are served from safetensors"
        )


def describe(config: Configuration) -> ModelFacts:
    """Read the facts from a configuration.

    Raises:
        ModelLoadError: something in it cannot be paged, or is not there.
    """
    check_pageable(config)
    family = config["model_type"]
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method:
        raise ModelLoadError(
            f"{family} with weights quantised by {method}, which are not read; expected float32, "
            "bfloat16 or float16: serve the unquantised checkpoint or a GGUF file"
        )
    _check_rope(family, config.get("rope_parameters"))
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    lacking = [n for n in (*names, "max_position_embeddings") if not isinstance(config.get(n), int)]
    if lacking:
        raise ModelLoadError(
            f"{family}: expected numbers {', '.join(lacking)} in its configuration, got "
            f"{', '.join(repr(config.get(name)) for name in lacking)}; models that differ from "
            "layer to layer are not served"
        )
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    windows = KNOWN_FAMILIES.get(family, _by_what_is_there)(config)
    if len(windows) != layers:
        raise ModelLoadError(
            f"expected {layers} layer_types, got {len(windows)}: config.json is inconsistent"
        )
    return ModelFacts(
        family=family,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        windows=windows,
        vocab_size=config["vocab_size"],
        max_position_tokens=config["max_position_embeddings"],
    )


def _check_rope(family: str, parameters: Configuration | None) -> None:
    """``parameters`` is one rotary setting, or one a layer type."""
    if not parameters:
        raise ModelLoadError(
            f"model family {family!r} is not supported: its positions are not rotary (but learned, "
            f"or a bias of scores); {SERVED}"
        )
    if "rope_type" in parameters:
        kind = parameters["rope_type"]
        if kind not in ROPE_TYPES or "mrope_section" in parameters:
            name = f"{kind!r}" if kind not in ROPE_TYPES else "in several dimensions (mrope)"
            raise ModelLoadError(
                f"{family}: rotary scaling {name} is not supported; expected one of "
                f"{', '.join(sorted(ROPE_TYPES))}"
            )
        return
    for value in parameters.values():
        if isinstance(value, dict):
            _check_rope(family, value)
