"""What the kernels for compute capability 9.0 (H100, H200) have in common: they are Gluon, the
language under Triton's, copy boxes of matrices with the tensor memory accelerator and multiply with
groups of four warps.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

CAPABILITY: Final = (9, 0)
ALIGNMENT: Final = 16
"""Bytes: of addresses and of strides between rows."""
SWIZZLED: Final = NVMMASharedLayout(128, 16)
"""How boxes lie in shared memory: rows of 128 bytes, elements of 16 bits."""
KINDS: Final = frozenset({torch.float16, torch.bfloat16})


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the kernels run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def can_be_copied(matrix: torch.Tensor) -> bool:
    """Whether boxes of ``[rows, columns]`` can be copied: kind, address and strides."""
    return (
        matrix.dtype in KINDS
        and matrix.stride(1) == 1
        and matrix.stride(0) * matrix.itemsize % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    )


def in_boxes(
    base: torch.Tensor, shape: tuple[int, int], row_stride: int, box: tuple[int, int]
) -> TensorDescriptor:
    """The matrix ``shape`` at the beginning of ``base``, with rows ``row_stride`` elements apart,
    for copies of ``box``. What a box has beyond the matrix reads as zero.
    """
    return TensorDescriptor(base, list(shape), [row_stride, 1], list(box), SWIZZLED)
