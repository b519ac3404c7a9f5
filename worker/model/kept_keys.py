"""Gathered keys and values of decoding sequences, kept from one step to the next.

What a decode step reads is what the last one read and one token more. Where the same sequences
decode again, only the new token's row is written behind the rest, instead of gathering every page
once more.

Invariant: memory is used again only by the sequences it was gathered for, named by their owner,
and only where each goes on from the token after the last one in it. What keys and values of the
first n tokens are never changes, wherever their pages lie; a sequence that went back begins anew. A
name is never given to a second sequence while memory is kept: see :meth:`KeptKeys.forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from worker.model.step import DecodeBucket, SequenceSlice

KEPT_BYTES: Final = 256 << 20
"""All that is kept at once: a second copy of keys and values, of as many sequences as fit."""

Gather = Callable[[torch.Tensor], None]
"""Fills memory with what the pages hold."""


@dataclass
class _Layer:
    """``memory`` ``[2, kv_heads, sequences, keys, head_dim]`` holds the first ``ends[i]`` tokens of
    sequence i; what lies behind them is finite.
    """

    memory: torch.Tensor
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Kept:
    """Of one bucket, by layer. ``width`` in blocks."""

    width: int
    layers: dict[int, _Layer] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptBucket:
    """One bucket's memory as seen by one step: sequence i goes from ``starts[i]`` to ``starts[i] +
    1`` tokens.
    """

    kept: _Kept
    starts: tuple[int, ...]
    row: torch.Tensor
    """int64 ``[sequences]``: 0, 1, ..."""
    place: torch.Tensor
    """int64 ``[sequences]``: where the new token's row goes."""

    def seen(
        self, index: int, new: torch.Tensor, shape: tuple[int, ...], gather: Gather
    ) -> torch.Tensor:
        """Keys and values of layer ``index``, ``shape`` ``(2, kv_heads, sequences, keys,
        head_dim)``: kept ones with the ``new`` rows ``[sequences, 2, kv_heads, head_dim]`` behind
        them, or all of them by ``gather``, where the new rows are in the pages already.
        """
        held = self.kept.layers.get(index)
        if held is None:
            held = self.kept.layers[index] = _Layer(new.new_empty(shape), ())
        if held.ends == self.starts:
            held.memory[:, :, self.row, self.place] = new.permute(1, 2, 0, 3)
        else:
            gather(held.memory)
        held.ends = tuple(start + 1 for start in self.starts)
        return held.memory


class KeptKeys:
    """The memory of one runner's last step."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[tuple[int, tuple[int, ...]], _Kept] = {}
        self._next: dict[tuple[int, tuple[int, ...]], _Kept] = {}
        self._bytes = 0

    def begin(self) -> None:
        """A step begins. What the one before it did not use is dropped."""
        self._kept, self._next, self._bytes = self._next, {}, 0

    def forget(self) -> None:
        """Names mean other sequences from now on."""
        self._kept, self._next, self._bytes = {}, {}, 0

    def bucket(
        self,
        group: int,
        bucket: DecodeBucket,
        pieces: Sequence[SequenceSlice],
        layers_bytes: int,
    ) -> KeptBucket | None:
        """The memory of a bucket of a layer group whose layers see everything; None where it is not
        kept: a sequence has no owner, or the limit is reached. ``layers_bytes``: keys and values of
        one block in all layers of the group.
        """
        owners = tuple(piece.owner for piece in pieces)
        size = len(owners) * bucket.width * layers_bytes
        if min(owners) < 0 or self._bytes + size > self._limit_bytes:
            return None
        self._bytes += size
        kept = self._kept.get((group, owners))
        if kept is None or kept.width != bucket.width:
            kept = _Kept(bucket.width)
        self._next[group, owners] = kept
        starts = tuple(piece.start for piece in pieces)
        return KeptBucket(kept, starts, torch.arange(len(starts)), torch.tensor(starts))
