"""Which attention runs a model's steps: chosen once, when its runner is made.

``torch`` is the reference and runs anywhere; ``triton`` runs on CUDA, or in Triton's interpreter
where a test says so. A backend owns no pages: it holds views of the storage's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import KVCacheLayerSpec
from kvcache_core.storage import TorchStorage
from worker.model.attention import AttentionStep, LayerPages, Scratch, StepContext
from worker.model.errors import AttentionInputError
from worker.model.kept_keys import KeptBucket, KeptKeys
from worker.model.step import DecodeBucket, GroupGeometry, SequenceSlice, plan_group

WIDEST_HEAD: Final = 256
"""Elements of a head that the ``triton`` kernels have tiles for."""


@dataclass(frozen=True)
class PagedLayers:
    """The pages of a model's layers: ``specs`` by layer index, ``dtype`` the model's.

    ``scales``, float32 ``[layers, 2, num_kv_heads]`` on the storage's device, multiply what float8
    pages hold; None where pages are in the model's type. ``head_sinks``: whether heads have sinks.
    """

    plan: LayoutPlan
    storage: TorchStorage
    specs: tuple[KVCacheLayerSpec, ...]
    dtype: torch.dtype
    scales: torch.Tensor | None = None
    head_sinks: bool = False

    def scales_of(self, index: int) -> torch.Tensor | None:
        """Of layer ``index``: ``[2, num_kv_heads]``."""
        return None if self.scales is None else self.scales[index]

    def group_of(self, spec: KVCacheLayerSpec) -> int:
        """Layer group of one of the model's layers.

        Raises:
            AttentionInputError: the plan lacks it.
        """
        try:
            return self.plan.layer_group_of(spec.layer_id).id
        except KeyError as error:
            raise AttentionInputError(
                f"the layout plan has no layer {spec.layer_id} of the model"
            ) from error

    @property
    def geometries(self) -> tuple[GroupGeometry, ...]:
        """Of every layer group."""
        return tuple(
            self._geometry(group.id, group.layer_ids[0]) for group in self.plan.layer_groups
        )

    def _geometry(self, group: int, layer_id: int) -> GroupGeometry:
        spec = self.plan.spec(layer_id)
        pool_group = self.plan.layer_groups[group].pool_group
        return GroupGeometry(
            tokens_per_block=self.plan.tokens_per_block,
            window=self.plan.layer_groups[group].life_cycle.window,
            sink_tokens=spec.sink_tokens,
            num_slots=len(self.storage.pool_bytes(pool_group, 0)),
            block_bytes=spec.bytes_per_token * self.plan.tokens_per_block,
        )


class AttentionBackend(Protocol):
    """Prepares steps. One thread uses it."""

    def begin(self, pieces: Sequence[SequenceSlice]) -> AttentionStep:
        """The step of a checked batch in flat order (:func:`worker.model.step.order`)."""
        ...

    def forget(self) -> None:
        """Owners of sequences (``SequenceSlice.owner``) mean others from now on."""
        ...


BackendMaker = Callable[[PagedLayers], AttentionBackend]


class TorchBackend(AttentionBackend):
    """Gathers pages and calls torch's attention."""

    def __init__(self, layers: PagedLayers) -> None:
        """Raises AttentionInputError: the plan lacks a layer, or pages have another shape."""
        self._plan, self._storage = layers.plan, layers.storage
        self._layers = tuple(
            LayerPages(
                layers.storage.kv(spec.layer_id), layers.group_of(spec), layers.scales_of(index)
            )
            for index, spec in enumerate(layers.specs)
        )
        self._geometries = layers.geometries
        self._like = torch.empty(0, dtype=layers.dtype, device=layers.storage.device)
        self._scratch = Scratch(self._like)
        self._kept = KeptKeys()
        self._layer_counts = [len(group.layer_ids) for group in layers.plan.layer_groups]

    @override
    def begin(self, pieces: Sequence[SequenceSlice]) -> StepContext:
        groups = tuple(
            plan_group(pieces, group, geometry, self._like)
            for group, geometry in enumerate(self._geometries)
        )
        self._clear_fresh([step.fresh_slots for step in groups])
        num_rows = sum(len(piece.tokens) for piece in pieces)
        self._kept.begin()
        kept = tuple(
            tuple(self._kept_of(group, bucket, pieces) for bucket in step.decode)
            for group, step in enumerate(groups)
        )
        return StepContext(self._layers, groups, num_rows, self._scratch, kept)

    @override
    def forget(self) -> None:
        self._kept.forget()

    def _kept_of(
        self, group: int, bucket: DecodeBucket, pieces: Sequence[SequenceSlice]
    ) -> KeptBucket | None:
        """On a CPU, whose memory is what a gather waits for, of layers that see everything."""
        geometry = self._geometries[group]
        if self._like.device.type != "cpu" or geometry.window is not None:
            return None
        layers_bytes = geometry.block_bytes * self._layer_counts[group]
        return self._kept.bucket(group, bucket, pieces[bucket.rows], layers_bytes)

    def _clear_fresh(self, fresh: Sequence[tuple[int, ...]]) -> None:
        """Zero slots that are begun and not filled: their tails are read under a mask, and 0 * NaN
        is NaN.
        """
        for group, slots in zip(self._plan.layer_groups, fresh, strict=True):
            for pool in range(len(group.slot_bytes)) if slots else ():
                pages = self._storage.pool_bytes(group.pool_group, pool)
                for slot in slots:
                    pages[slot].zero_()


def triton_backend(layers: PagedLayers) -> AttentionBackend:
    """The ``triton`` backend. Triton is imported here: a CPU serves without it."""
    from worker.model.triton_backend import TritonBackend

    return TritonBackend(layers)


def backend_of(layers: PagedLayers) -> AttentionBackend:
    """The faster one that the device and the model's heads allow."""
    fits = all(spec.head_dim <= WIDEST_HEAD for spec in layers.specs)
    if layers.storage.device.type == "cuda" and fits and not layers.head_sinks:
        return triton_backend(layers)
    return TorchBackend(layers)
