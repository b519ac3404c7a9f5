"""Products and placing of the fused decoder by our Triton kernels: up to a few rows the norm before
a product and the bias, activation or residual after it are part of the product's kernel.

The only file of the model that imports kernels of layers; imported where they can run.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import linear
from typing_extensions import override

from worker.model.attention import AttentionStep
from worker.model.fused import LayerParts
from worker.model.heads import Angles, HeadRows, Placing
from worker.model.kernels import hopper_gated
from worker.model.kernels.activation import silu_product
from worker.model.kernels.rotary import HeadNorm, Places, Rotary, rotate_and_store
from worker.model.kernels.row_norm import WIDEST, row_norm
from worker.model.kernels.skinny import MOST_ROWS, Matrix, Norm, gated_product, product
from worker.model.products import Activation, Product, RowNorm


class KernelProduct(Product):
    """A plain matrix ``[out, in]`` whose gate, where it has one, is SiLU."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm: RowNorm | None = None
    ) -> None:
        """Any norm will do."""
        self._matrix = Matrix(weight, bias)

    @override
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if 0 < len(rows) <= MOST_ROWS:
            return product(rows, self._matrix)
        return linear(rows, self._matrix.weight, self._matrix.bias)

    @override
    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if 0 < len(rows) <= MOST_ROWS:
            return product(rows, self._matrix, residual=residual)
        if self._matrix.bias is not None:
            residual += self._matrix.bias
        return residual.addmm_(rows, self._matrix.weight.t())

    @override
    def normed(self, rows: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        if _takes_norm(rows):
            return product(rows, self._matrix, norm=Norm(norm.weight, norm.eps))
        return self(_normed(rows, norm))

    @override
    def gated(self, rows: torch.Tensor, norm: RowNorm, activation: Activation) -> torch.Tensor:
        if _takes_norm(rows):
            return gated_product(rows, self._matrix, norm=Norm(norm.weight, norm.eps))
        normed = _normed(rows, norm)
        if 0 < len(rows) <= MOST_ROWS:
            return gated_product(normed, self._matrix)
        if self._matrix.bias is None and hopper_gated.takes(normed, self._matrix.weight):
            return hopper_gated.gated_rows(normed, self._matrix.weight)
        return silu_product(linear(normed, self._matrix.weight, self._matrix.bias))


class KernelPlacing(Placing):
    """One kernel for all of it. A row whose slot is negative is placed nowhere."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    @override
    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        return Angles(cos, sin)

    @override
    def __call__(self, rows: HeadRows, angles: Angles, step: AttentionStep) -> torch.Tensor:
        target = step.target(rows.layer)
        rotate_and_store(
            rows.heads,
            Rotary(angles.cos, angles.sin),
            None if rows.norm is None else HeadNorm(rows.norm, self._eps),
            Places(target.slots, target.offsets),
            target.pages,
            target.scales,
        )
        return step.attend_stored(rows.layer, rows.query, rows.key_value, rows.scale)


KERNEL_PARTS: Final = LayerParts(KernelProduct, KernelPlacing)


def _normed(rows: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    return row_norm(rows, norm.weight, norm.eps) if rows.shape[1] <= WIDEST else norm(rows)


def _takes_norm(rows: torch.Tensor) -> bool:
    """Several float16 rows could overflow: a tensor core gets them scaled, before the norm's factor
    makes them small again.
    """
    if not 0 < len(rows) <= MOST_ROWS:
        return False
    return len(rows) == 1 or rows.dtype != torch.float16
