"""Why a model cannot be paged, as far as its config.json says it: read before anything else is, by
the launcher too, which has no transformers.

Each kind of refusal is a function of the configuration that gives the reason or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from worker.model.errors import ModelLoadError

Configuration = dict[str, Any]
"""A transformers configuration as ``to_dict()`` gives it, or config.json as it lies."""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

WITHOUT_PAGES: Final = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm"),
        "its layers carry a state from token to token",
    ),
    **dict.fromkeys(
        ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"),
        "its positions are not rotary",
    ),
    **dict.fromkeys(("bloom", "mpt"), "it has positions as a bias of scores"),
    **dict.fromkeys(
        ("albert", "bert", "camembert", "electra", "roberta", "xlm-roberta"),
        "it sees later tokens",
    ),
}
"""Families whose config.json does not tell."""

SERVED: Final = "serve a decoder-only text model whose layers attend over keys and values"


def check_pageable(config: Configuration) -> None:
    """Raises:
    ModelLoadError: the model has something that no page holds; the message names it.
    """
    for reason_of in _REASONS:
        reason = reason_of(config)
        if reason is not None:
            raise ModelLoadError(f"model family {config['model_type']!r} is not supported{reason}")


def _by_name(config: Configuration) -> str | None:
    reason = WITHOUT_PAGES.get(config["model_type"])
    return None if reason is None else f": {reason}; {SERVED}"


def _two_stacks(config: Configuration) -> str | None:
    if config.get("is_encoder_decoder"):
        return f": it is an encoder with a decoder; {SERVED}"
    if config.get("add_cross_attention") or config.get("cross_attention_layers"):
        return f": it attends over another sequence (cross attention); {SERVED}"
    return None


def _more_than_text(config: Configuration) -> str | None:
    text = config.get("text_config")
    if isinstance(text, dict):
        kind = text.get("model_type") or f"{config['model_type']}_text"
        return f": it takes more than text; serve its text-only variant, {kind}, as a checkpoint"
    others = sorted(name for name in ("vision_config", "audio_config") if config.get(name))
    return f": it takes more than text ({', '.join(others)}); {SERVED}" if others else None


def _latent(config: Configuration) -> str | None:
    if config.get("kv_lora_rank"):
        return f": it has latent attention (MLA, kv_lora_rank {config['kv_lora_rank']}); {SERVED}"
    return None


def _layer_types(config: Configuration) -> str | None:
    for layer, kind in enumerate(config.get("layer_types") or ()):
        if kind not in (FULL, SLIDING):
            return f": layer {layer} has type {kind!r}: only full and sliding attention are served"
    return None


def _both_ways(config: Configuration) -> str | None:
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return f": with bidirectional attention it sees later tokens; {SERVED}"
    return None


_REASONS: Final[tuple[Callable[[Configuration], str | None], ...]] = (
    _by_name,
    _two_stacks,
    _more_than_text,
    _latent,
    _layer_types,
    _both_ways,
)
