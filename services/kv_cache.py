"""What can be said of an instance's KV cache before its worker has read the model: its element
type, and whether it holds a step. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.config import ServeConfig
from services.errors import ConfigError
from services.resources import InstancePlan
from services.step_limits import step_limits
from services.units import format_bytes

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def model_dtype(config: ServeConfig, device: str) -> str | None:
    """What the model computes in; None where its checkpoint decides."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else None


def kv_element_bytes(config: ServeConfig, device: str) -> int:
    """Of one number; 2 where the checkpoint decides, as nearly all do."""
    if config.kv_cache_dtype != "auto":
        return ELEMENT_BYTES[config.kv_cache_dtype]
    return ELEMENT_BYTES[model_dtype(config, device) or "bfloat16"]


def check_kv_types(config: ServeConfig, plans: Sequence[InstancePlan]) -> None:
    """Raises ConfigError for a type that is neither the model's nor fp8, where the model's is
    known."""
    for device in sorted({plan.device for plan in plans}):
        computed = model_dtype(config, device)
        if computed is not None and config.kv_cache_dtype not in {"auto", "fp8", computed}:
            raise ConfigError(
                f"kv_cache_dtype: expected auto, fp8 or {computed}, which the model computes in on "
                f"{device}, got {config.kv_cache_dtype}; choose --dtype {config.kv_cache_dtype} "
                "too, or fp8"
            )


def check_cache_holds_a_step(
    config: ServeConfig, plans: Sequence[InstancePlan], kv_elements_per_token: int | None
) -> None:
    """Raises ConfigError for a KV cache without room for the tokens of one step: the least a worker
    starts with.
    """
    if kv_elements_per_token is None:
        return
    for plan in plans:
        if plan.kv_cache_bytes is None:
            continue  # the worker says it, with what it has measured
        tokens = step_limits(config, plan.device).tokens
        blocks = -(-tokens // config.tokens_per_block)
        sharers = plan.tensor_parallel_size // plan.attention_dp_size
        held = -(-kv_elements_per_token // sharers)
        block_bytes = config.tokens_per_block * held * kv_element_bytes(config, plan.device)
        if plan.kv_cache_bytes < blocks * block_bytes:
            raise ConfigError(
                f"kv_cache_bytes: expected at least {format_bytes(blocks * block_bytes)}, which the"
                f" {tokens} tokens of a step of this model take, got "
                f"{format_bytes(plan.kv_cache_bytes)}; give more, or lower max_batch_tokens"
            )
