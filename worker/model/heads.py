"""What happens to the product of queries, keys and values before attention: norm of each head,
rotary embedding in place, and the write of new keys and values to the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import rms_norm
from typing_extensions import override

from worker.model.attention import Target


@dataclass(frozen=True)
class Angles:
    """What a placing made of cosines and sines, once a step for all layers."""

    cos: torch.Tensor
    sin: torch.Tensor


class Placing(Protocol):
    """How heads become what attention reads."""

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """From ``[T, head_dim]``, each half of a row like the other."""

    def __call__(
        self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles, target: Target
    ) -> None:
        """``heads`` is ``[T, query heads + 2 * kv heads, head_dim]``, contiguous: queries, keys,
        values. ``norm`` ``[query and key heads, head_dim]`` is there in families that norm heads.
        """


class TorchPlacing(Placing):
    """In torch, for any device."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    @override
    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == roll(x) * (-sin, sin)
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return Angles(cos.unsqueeze(1), signed_sin.unsqueeze(1))

    @override
    def __call__(
        self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles, target: Target
    ) -> None:
        kv_heads, dim = target.layer.num_kv_heads, heads.shape[2]
        query_key = heads[:, : heads.shape[1] - kv_heads]
        if norm is not None:
            query_key.copy_(rms_norm(query_key, (dim,), None, self._eps) * norm)
        rolled = query_key.roll(dim // 2, -1)
        torch.addcmul(query_key * angles.cos, rolled, angles.sin, out=query_key)
        rows = heads[:, heads.shape[1] - 2 * kv_heads :].unflatten(1, (2, kv_heads))
        target.layer.write(target.slots, target.offsets, rows)
