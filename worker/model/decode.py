"""Decode steps over fixed device memory, one captured piece of work for each bucket of batch sizes.

A batch of single tokens is padded to its bucket. Everything that changes from step to step is one
int32 vector, uploaded with one copy: the metadata that attention and placing read, tokens, and
which of them the last step drew (``TokenFeed``). Padding sequences have length 0 and their keys and
values go nowhere.

A step may be queued while earlier ones are: each has its own values. Logits of a bucket are
overwritten by its next step, in the order of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvcache_core.arithmetic import ceil_div
from kvcache_core.storage.upload import CopyQueue, VectorUpload
from worker.model.attention import AttentionStep
from worker.model.capture import Body, Capture
from worker.model.feed import TokenFeed
from worker.model.networks import Network
from worker.model.step import GroupGeometry, SequenceSlice
from worker.model.step_metadata import (
    MetadataShape,
    StepMetadata,
    describe_decode,
    describe_padding,
)
from worker.upload import upload

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that are captured: at most a half of a batch is padding below 16, a third above."""


def buckets_for(most_sequences: int) -> tuple[int, ...]:
    """Batch sizes to capture where a step has at most so many sequences."""
    top = min(most_sequences, BUCKETS[-1])
    return (*(size for size in BUCKETS if size < top), top)


MakeStep = Callable[[StepMetadata], AttentionStep]
"""A step of a backend that follows metadata in fixed memory."""


@dataclass(frozen=True)
class DecodeLimits:
    """Batch sizes to capture, ascending, and the longest sequence that a captured step takes."""

    buckets: tuple[int, ...]
    max_sequence_tokens: int


@dataclass(frozen=True)
class Decoding:
    """How decode steps run apart from mixed ones. The network and the step must place rows whose
    slots are negative nowhere.
    """

    network: Network
    step: MakeStep
    capture: Capture
    limits: DecodeLimits


@dataclass(frozen=True)
class _Bucket:
    """Memory of one batch size. ``values``, on the host, is changed from step to step."""

    shape: MetadataShape
    values: torch.Tensor
    inputs: VectorUpload
    launch: Body


class DecodeRunner:
    """Runs batches of single tokens."""

    def __init__(
        self,
        geometries: tuple[GroupGeometry, ...],
        device: torch.device,
        decoding: Decoding,
        feed: TokenFeed,
        queue: CopyQueue | None = None,
    ) -> None:
        """``queue`` carries the uploads; the device's own unless it is given."""
        self._geometries = geometries
        self._decoding = decoding
        self._device = device
        self._feed = feed
        self._queue = queue
        longest = decoding.limits.max_sequence_tokens
        self._widths = tuple(ceil_div(longest, part.tokens_per_block) for part in geometries)
        self._buckets: dict[int, _Bucket] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes captured so far, ascending."""
        return tuple(sorted(self._buckets))

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every batch size, largest first, so that the others find room in its memory.
        Nothing is written to pages. All ranks do so at once.
        """
        for size in reversed(self._decoding.limits.buckets):
            self._bucket(size)

    def accepts(self, batch: Sequence[SequenceSlice]) -> bool:
        """Whether this is a decode batch within the limits."""
        limits = self._decoding.limits
        return 0 < len(batch) <= limits.buckets[-1] and all(
            len(piece.tokens) == 1 and piece.end <= limits.max_sequence_tokens for piece in batch
        )

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute an accepted batch: float32 logits ``[number of wants_logits, vocab_size]`` in
        batch order, valid until the next step.
        """
        count = len(batch)
        size = next(size for size in self._decoding.limits.buckets if size >= count)
        bucket = self._bucket(size)
        numbers, total = bucket.values.numpy(), bucket.shape.total
        describe_decode(numbers[:total], batch, self._geometries, bucket.shape)
        numbers[total : total + count] = [piece.tokens[0] for piece in batch]
        numbers[total + size : total + size + count] = [piece.feed for piece in batch]
        numbers[total + size + count :] = -1
        bucket.inputs.host().copy_(bucket.values)
        bucket.inputs.send()
        logits = bucket.launch()
        wanted = [row for row, piece in enumerate(batch) if piece.wants_logits]
        if len(wanted) == count:
            return logits[:count]
        (rows,) = upload([np.array(wanted, np.int64)], self._device)
        return logits[rows]

    def _bucket(self, size: int) -> _Bucket:
        found = self._buckets.get(size)
        if found is None:
            found = self._buckets[size] = self._make(size)
        return found

    def _make(self, size: int) -> _Bucket:
        """Capture a bucket over memory that describes nothing but padding."""
        shape = MetadataShape.for_decode(size, self._widths)
        nothing = np.zeros(size, np.int32)
        values = torch.from_numpy(np.concatenate((describe_padding(shape), nothing, nothing - 1)))
        inputs = VectorUpload(values, self._device, self._queue)
        metadata = StepMetadata(shape, inputs.vector[: shape.total])
        tokens = inputs.vector[shape.total : shape.total + size]
        feeds = inputs.vector[shape.total + size :]
        rows = torch.arange(shape.rows, device=self._device)
        step = self._decoding.step(metadata)

        def body() -> torch.Tensor:
            fed = self._feed.filled(tokens, feeds)
            return self._decoding.network(fed, metadata.starts, step, rows)

        return _Bucket(shape, values, inputs, self._decoding.capture(body))
