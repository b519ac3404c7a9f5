"""The model families we serve, and what each one's configuration says about its KV cache.

Everything here reads a transformers configuration and returns values; an unknown family or a
feature that our attention does not compute is refused with its name, never served wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from worker.model.errors import ModelLoadError

Configuration = dict[str, Any]
"""A transformers configuration as ``to_dict()`` gives it."""

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


def _all_layers_windowed(config: Configuration) -> tuple[int | None, ...]:
    """Mistral, Mixtral and Qwen 3's mixture: one ``sliding_window`` for every layer, or none."""
    window: int | None = config["sliding_window"]
    return (window,) * int(config["num_hidden_layers"])


def _by_layer_type(config: Configuration) -> tuple[int | None, ...]:
    """Qwen and Gemma: ``layer_types`` names each layer (Qwen's follows from max_window_layers)."""
    windows: list[int | None] = []
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(int(config["sliding_window"]))
        else:
            raise ModelLoadError(
                f"layer {layer} has type {kind!r}: only full and sliding attention are served"
            )
    return tuple(windows)


def _no_windows(config: Configuration) -> tuple[int | None, ...]:
    return (None,) * int(config["num_hidden_layers"])


FAMILIES: Final[dict[str, Callable[[Configuration], tuple[int | None, ...]]]] = {
    "llama": _no_windows,
    "qwen2": _by_layer_type,
    "qwen3": _by_layer_type,
    "mistral": _all_layers_windowed,
    "gemma3_text": _by_layer_type,
    "mixtral": _all_layers_windowed,
    "qwen3_moe": _all_layers_windowed,
}
"""transformers model type -> windows per layer."""

GGUF_ARCHITECTURES: Final = frozenset({"llama", "qwen2", "qwen3", "gemma3"})


def check_supported(model_type: str, supported: frozenset[str]) -> None:
    """Raises:
    ModelLoadError: the family is not one of ours; the message names those that are.
    """
    if model_type in supported:
        return
    hint = " (its text-only variant, gemma3_text, is)" if model_type == "gemma3" else ""
    raise ModelLoadError(
        f"model family {model_type!r} is not supported{hint}; expected one of "
        f"{', '.join(sorted(supported))}"
    )


def describe(config: Configuration) -> ModelFacts:
    """Read the facts from a configuration.

    Raises:
        ModelLoadError: unknown family, layer type or rotary scaling.
    """
    family = config["model_type"]
    check_supported(family, frozenset(FAMILIES))
    _check_rope(config["rope_parameters"])
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError(
            f"{family} with bidirectional attention is not a decoder; it cannot be served"
        )
    windows = FAMILIES[family](config)
    if len(windows) != config["num_hidden_layers"]:
        raise ModelLoadError(
            f"expected {config['num_hidden_layers']} layer_types, got {len(windows)}: "
            "config.json is inconsistent"
        )
    return ModelFacts(
        family=family,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"]
        if config.get("head_dim")
        else config["hidden_size"] // config["num_attention_heads"],
        windows=windows,
        vocab_size=config["vocab_size"],
        max_position_tokens=config["max_position_embeddings"],
    )


def _check_rope(parameters: Configuration) -> None:
    """``parameters`` is one rotary setting, or one a layer type."""
    if "rope_type" in parameters:
        if parameters["rope_type"] not in ROPE_TYPES:
            raise ModelLoadError(
                f"rotary scaling {parameters['rope_type']!r} is not supported; expected one of "
                f"{', '.join(sorted(ROPE_TYPES))}"
            )
        return
    for value in parameters.values():
        if isinstance(value, dict):
            _check_rope(value)
