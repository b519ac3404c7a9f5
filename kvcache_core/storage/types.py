"""Element types and their torch types."""

from __future__ import annotations

import torch

from kvcache_core.spec import ElementType

TORCH_TYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
    ElementType.UINT8: torch.uint8,
    ElementType.PACKED4: torch.uint8,
}


def element_type_of(dtype: torch.dtype) -> ElementType:
    """The element type of a torch type. Raises ValueError for one that no cache can hold."""
    for element, known in TORCH_TYPES.items():
        if known is dtype:
            return element
    supported = [str(known) for known in TORCH_TYPES.values()]
    raise ValueError(f"no KV cache of {dtype}; expected one of {supported}")
