"""The element type of keys and values in pages: the type a model computes in, or float8.

The rule is that of draft layers: an unquantised type that differs from the weights' is an error,
never a silent conversion.
"""

from __future__ import annotations

from typing import Final

import torch

from kvcache_core.spec import ElementType
from worker.config import KVElementType
from worker.model.errors import ModelLoadError

FLOAT8_CAPABILITY: Final = (8, 9)
"""The first GPUs that convert float8_e4m3: Ada and Hopper."""


def kv_element_type(wanted: KVElementType, weights: ElementType) -> ElementType:
    """What pages of a model with ``weights`` hold.

    Raises:
        ModelLoadError: an unquantised type that is not the weights'.
    """
    if wanted == "auto":
        return weights
    if wanted == "fp8":
        return ElementType.FLOAT8_E4M3
    if ElementType(wanted) is weights:
        return weights
    raise ModelLoadError(
        f"kv_cache_dtype {wanted}: expected fp8 or {weights.value}, which the model computes in; "
        f"choose dtype {wanted} too, or leave kv_cache_dtype at auto"
    )


def check_device(chosen: ElementType, device: torch.device) -> None:
    """Raises:
    ModelLoadError: the device cannot read pages of this type.
    """
    if chosen is ElementType.FLOAT8_E4M3 and device.type == "cuda":
        check_capability(torch.cuda.get_device_capability(device))


def check_capability(capability: tuple[int, int]) -> None:
    """Whether a GPU of this compute capability converts float8. Raises ModelLoadError."""
    if capability < FLOAT8_CAPABILITY:
        raise ModelLoadError(
            f"kv_cache_dtype fp8: expected a GPU of compute capability {_dotted(FLOAT8_CAPABILITY)}"
            f" or more, got {_dotted(capability)}; leave kv_cache_dtype at auto"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
