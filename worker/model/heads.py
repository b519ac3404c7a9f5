"""What happens to the product of queries, keys and values: norm of each head, rotary embedding in
place, the write of new keys and values to the pages, attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import rms_norm
from typing_extensions import override

from worker.model.attention import AttentionStep


@dataclass(frozen=True)
class Angles:
    """What a placing made of cosines and sines, once a step for all layers."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadRows:
    """``heads`` ``[T, num_query + 2 * num_kv, head_dim]``, contiguous, of layer ``layer``: queries,
    keys, values. ``norm`` ``[query and key heads, head_dim]`` is there in families that norm heads.
    """

    layer: int
    heads: torch.Tensor
    num_query: int
    num_kv: int
    norm: torch.Tensor | None
    scale: float

    @property
    def query(self) -> torch.Tensor:
        """``[T, num_query, head_dim]``"""
        return self.heads[:, : self.num_query]

    @property
    def key_value(self) -> torch.Tensor:
        """``[T, 2, num_kv, head_dim]``"""
        return self.heads[:, self.num_query :].unflatten(1, (2, self.num_kv))


class Placing(Protocol):
    """How heads become what attention reads."""

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """From ``[T, head_dim]``, each half of a row like the other."""

    def __call__(self, rows: HeadRows, angles: Angles, step: AttentionStep) -> torch.Tensor:
        """Norm and rotate in place, store, attend: ``[T, query heads, head_dim]``, contiguous."""


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
    def __call__(self, rows: HeadRows, angles: Angles, step: AttentionStep) -> torch.Tensor:
        dim = rows.heads.shape[2]
        query_key = rows.heads[:, : rows.num_query + rows.num_kv]
        if rows.norm is not None:
            query_key.copy_(rms_norm(query_key, (dim,), None, self._eps) * rows.norm)
        rolled = query_key.roll(dim // 2, -1)
        torch.addcmul(query_key * angles.cos, rolled, angles.sin, out=query_key)
        return step.attend(rows.layer, rows.query, rows.key_value, rows.scale)
