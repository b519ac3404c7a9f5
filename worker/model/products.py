"""Matrix products of the fused decoder: several linear modules with one input as one product.

On a CPU the matrix is packed once by oneDNN. A general product repacks it at every call, which for
the few rows of a decode step costs more than the arithmetic: packed in float32, 2 to 12 rows take
about half the time, one row and long prefills the same; in bfloat16, on a CPU with instructions for
it, any number of rows takes two thirds or less, and half of packed float32. Elsewhere it is one
matrix and the modules' own weights are views of it, so that nothing is held twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear, pad, rms_norm
from typing_extensions import override

PACKED_FOR_ROWS: Final = 8
"""The number of rows oneDNN chooses the layout for; any number is right."""
EXACT_ROWS: Final = 16
"""Up to here every number of rows is multiplied as it is."""


Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm over whole rows: ``weight`` ``[in]``."""

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)


class Product(ABC):
    """``rows @ weight.T + bias`` for rows ``[T, in]``."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[T, out]``, contiguous."""

    @abstractmethod
    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``residual + product``, which may take the residual's memory."""

    def normed(self, rows: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        """The product of normed rows: ``[T, out]``, contiguous. ``norm`` is the one that the
        product was made with, if it was made with one.
        """
        return self(norm(rows))

    def gated(self, rows: torch.Tensor, norm: RowNorm, activation: Activation) -> torch.Tensor:
        """``activation(gate) * up`` where the product of normed rows is ``[gate, up]``."""
        gate, up = self.normed(rows, norm).chunk(2, 1)
        return activation(gate).mul_(up)


class DenseProduct(Product):
    """A plain matrix ``[out, in]``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm: RowNorm | None = None
    ) -> None:
        """Any norm will do."""
        self._weight = weight
        self._bias = bias

    @override
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight, self._bias)

    @override
    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return residual + linear(rows, self._weight, self._bias)


def padded_rows(count: int) -> int:
    """``count`` rows or up to an eighth more: eight numbers for each doubling."""
    step = 1 if count <= EXACT_ROWS else 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


class PackedProduct(Product):
    """A matrix in oneDNN's own layout.

    oneDNN compiles a kernel for each number of rows and keeps it, 0.1 to 5 MB each: the steps of a
    worker, which have any number of rows, would cost gigabytes. So rows are added to make the
    number one of a few.

    The weight of a norm is part of a float32 matrix: behind hundreds of megabytes of weights
    nothing is in a core's cache, the code of a small operation neither, and each costs some 10 us.
    A bfloat16 matrix would be rounded once more by it.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm: RowNorm | None = None
    ) -> None:
        """In float32 with a ``norm`` it is a product of rows that have this norm, no others."""
        self._norm = norm if weight.dtype == torch.float32 else None
        if self._norm is not None and norm is not None:
            width = weight.shape[1]
            self._added = torch.tensor(math.sqrt(width * norm.eps))
            weight = weight * (norm.weight * math.sqrt(width))
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    @override
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            raise ValueError("expected rows to be normed by this product; call normed or gated")
        return self._product(rows)

    @override
    def normed(self, rows: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        if self._norm is None:
            return self._product(norm(rows))
        if norm is not self._norm:
            raise ValueError("expected the norm that the product was made with, got another one")
        # sqrt(sum of squares + width * eps), by which and by sqrt(width) the rows are divided.
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return self._product(rows / torch.hypot(length, self._added))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        found: torch.Tensor = self._plain(_padded(rows), self._weight, self._bias, "none", [], "")
        return found[:count]

    @override
    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        found: torch.Tensor = self._binary(
            _padded(rows), _padded(residual), self._weight, self._bias, "add"
        )
        return found[:count]


MakeProduct = Callable[[torch.Tensor, torch.Tensor | None, RowNorm | None], Product]
"""A product from its matrix ``[out, in]``, its bias, and the norm of all rows that will enter."""


def make_product(weight: torch.Tensor, bias: torch.Tensor | None, norm: RowNorm | None) -> Product:
    """The fastest that torch has for this matrix."""
    return (PackedProduct if can_pack(weight) else DenseProduct)(weight, bias, norm)


def fused(
    linears: Sequence[Any], make: MakeProduct = make_product, norm: RowNorm | None = None
) -> Product:
    """One product for linear modules with the same input, outputs side by side. ``norm``: of all
    rows that will enter it.

    Afterwards the modules' weights are views of the product's, or empty where it is packed: the
    modules then cannot run any more.
    """
    with torch.no_grad():
        weight = torch.cat([module.weight for module in linears])
        bias = None
        if any(module.bias is not None for module in linears):
            bias = torch.cat([_bias(module) for module in linears])
    product = make(weight, bias, norm)
    if isinstance(product, PackedProduct):
        for module in linears:
            module.weight = _parameter(weight.new_empty(0))
        return product
    start = 0
    for module in linears:
        end = start + module.out_features
        module.weight = _parameter(weight[start:end])
        start = end
    return product


def head(module: Any, norm: RowNorm, make: MakeProduct = make_product) -> Product:
    """The product of a language head, whose matrix may be the embedding too and stays as it is."""
    return make(module.weight.detach(), module.bias, norm)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can pack this matrix here, and has instructions for its type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return weight.dtype == torch.float32


def _padded(rows: torch.Tensor) -> torch.Tensor:
    more = padded_rows(len(rows)) - len(rows)
    return pad(rows, (0, 0, 0, more)) if more else rows


def _bias(module: Any) -> torch.Tensor:
    bias: torch.Tensor | None = module.bias
    return module.weight.new_zeros(module.out_features) if bias is None else bias


def _parameter(view: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(view, requires_grad=False)
