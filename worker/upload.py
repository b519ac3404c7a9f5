"""Many small arrays to a device in one copy that nobody waits for.

torch waits for the stream when it copies from memory that is not pinned: a step that uploads so
cannot be queued behind another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

ALIGNMENT: Final = 16


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same shapes and dtypes on ``device``, behind what is queued there.

    On a CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    begins = [0, *ends[:-1]]
    packed = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for array, begin in zip(arrays, begins, strict=True):
        host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # torch's host allocator keeps the pinned memory until the copy is complete.
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, begin in zip(arrays, begins, strict=True)
    ]


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
