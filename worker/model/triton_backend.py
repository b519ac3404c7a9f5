"""Steps of the ``triton`` attention backend: one vector of metadata a step, one upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from worker.model.attention import AttentionStep, Target
from worker.model.backend import AttentionBackend, PagedLayers
from worker.model.errors import AttentionInputError
from worker.model.step import SequenceSlice
from worker.model.step_metadata import MetadataShape, StepMetadata, describe_step
from worker.model.triton_attention import (
    KernelPages,
    TritonAttention,
    check_query,
    read,
    write,
)


@dataclass(frozen=True)
class TritonStep(AttentionStep):
    """A described step over one model's layers; captured graphs keep one."""

    attention: TritonAttention
    metadata: StepMetadata

    @override
    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks is not None:
            raise AttentionInputError(
                "expected no sinks of heads, which the triton kernels do not have; take the torch "
                "backend"
            )
        layer = self.attention.layers[index]
        if softcap is not None:
            return self.attention.attend(self.metadata, index, query, key_value, scale, softcap)
        check_query(layer, self.metadata, query)
        write(layer, self.metadata, key_value, query.dtype)
        return self.attend_stored(index, query, key_value, scale)

    @override
    def target(self, index: int) -> Target:
        layer = self.attention.layers[index]
        group = self.metadata.groups[layer.group]
        return Target(layer.pages, group.write_slots, group.write_offsets, layer.scales)

    @override
    def attend_stored(
        self, index: int, query: torch.Tensor, key_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return read(self.attention.layers[index], self.metadata, query, scale)

    @override
    def of_drawn(self) -> TritonStep:
        return TritonStep(self.attention, self.metadata.of_drawn())


class TritonBackend(AttentionBackend):
    """Pages stay where they are; a step is described in one vector."""

    def __init__(self, layers: PagedLayers) -> None:
        """Raises AttentionInputError: the plan lacks a layer, or its pages cannot be addressed."""
        self._geometries = layers.geometries
        self._device = layers.storage.device
        self.attention = TritonAttention(
            [
                KernelPages(
                    layers.storage.kv(spec.layer_id),
                    layers.group_of(spec),
                    self._geometries[layers.group_of(spec)],
                    layers.scales_of(index),
                )
                for index, spec in enumerate(layers.specs)
            ]
        )

    def over(self, metadata: StepMetadata) -> TritonStep:
        """A step that follows metadata in fixed memory, for captured graphs."""
        return TritonStep(self.attention, metadata)

    @override
    def forget(self) -> None:
        """Nothing is kept of them."""

    @override
    def begin(self, pieces: Sequence[SequenceSlice]) -> TritonStep:
        shape = MetadataShape.of(pieces, self._geometries)
        vector = torch.from_numpy(describe_step(pieces, self._geometries, shape))
        if self._device.type == "cuda":
            # torch's host allocator keeps the pinned memory until the copy is complete.
            vector = vector.pin_memory().to(self._device, non_blocking=True)
        return TritonStep(self.attention, StepMetadata(shape, vector))
