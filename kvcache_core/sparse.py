"""Targets with sparse layers: layers that pick the tokens they attend to by an INDEX_KEY buffer.

Their kernels take raw slots; a drafter beside them keeps dense attention and page indices of its
own. What such a target demands of the specs is one list of rules, checked when the plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcache_core.life_cycle import LifeCycle
from kvcache_core.spec import (
    BufferRole,
    ElementType,
    IndexKind,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
)


@dataclass(frozen=True, kw_only=True)
class SparseSplit:
    """Which layers of a whole checkpoint are sparse, whatever part of it a rank holds.

    ``sparse`` None is the usual split: the first ``dense_prefix`` layers dense, all others sparse.
    """

    num_target_layers: int
    sparse: frozenset[int] | None = None
    dense_prefix: int = 3

    def is_sparse(self, spec: KVCacheLayerSpec) -> bool:
        """True for a sparse target layer; draft layers never are."""
        if spec.owner is KVCacheLayerOwner.DRAFT or spec.layer_id >= self.num_target_layers:
            return False
        if self.sparse is not None:
            return spec.layer_id in self.sparse
        return spec.layer_id >= self.dense_prefix


def sparse_layer_ids(specs: Sequence[KVCacheLayerSpec]) -> tuple[int, ...]:
    """Target layers with index keys, ascending."""
    return tuple(
        sorted(
            spec.layer_id
            for spec in specs
            if spec.owner is KVCacheLayerOwner.TARGET and _has_index_keys(spec)
        )
    )


def _has_index_keys(spec: KVCacheLayerSpec) -> bool:
    return any(buffer.role is BufferRole.INDEX_KEY for buffer in spec.buffers)


def sparse_specs(
    specs: Sequence[KVCacheLayerSpec], split: SparseSplit, cache_dtype: ElementType
) -> tuple[KVCacheLayerSpec, ...]:
    """Specs of a sparse target and its drafter, each layer with the dtype and index kind it uses.

    Target layers come with ``cache_dtype`` and take raw slots; where that is PACKED4 the dense ones
    are stored as FLOAT8_E4M3, without scales. Draft layers keep their dtype and count pages of
    their own. Raises ValueError for a target layer of another dtype, or one whose index keys
    contradict the split.
    """
    resolved: list[KVCacheLayerSpec] = []
    for spec in specs:
        if spec.owner is KVCacheLayerOwner.DRAFT:
            resolved.append(replace(spec, index_kind=IndexKind.PER_LAYER))
            continue
        if spec.dtype is not cache_dtype:
            raise ValueError(
                f"target layer {spec.layer_id} is {spec.dtype.value}, the cache is "
                f"{cache_dtype.value}; give target layers the cache's dtype"
            )
        if split.is_sparse(spec) is not _has_index_keys(spec):
            has, said = ("has no", "sparse") if split.is_sparse(spec) else ("has", "dense")
            raise ValueError(
                f"target layer {spec.layer_id} {has} index keys, but the checkpoint's split "
                f"says {said}"
            )
        raw = replace(spec, index_kind=IndexKind.RAW_SLOT)
        if cache_dtype is ElementType.PACKED4 and not split.is_sparse(spec):
            raw = replace(raw, dtype=ElementType.FLOAT8_E4M3, scale_block_elements=None)
        resolved.append(raw)
    return tuple(resolved)


def draft_conflicts(
    specs: Sequence[KVCacheLayerSpec], life_cycles: Mapping[int, LifeCycle]
) -> tuple[str, ...]:
    """What forbids these draft layers, each as a sentence; ``life_cycles`` is keyed by layer id."""
    drafts = [spec for spec in specs if spec.owner is KVCacheLayerOwner.DRAFT]
    found = [
        f"draft layer {spec.layer_id} has {buffer.role.value} pages that are "
        f"{buffer.mapping.value}; drafters write head-major pages, and a transfer must know it"
        for spec in drafts
        if spec.policy is not ReusePolicy.PRIVATE
        for buffer in spec.buffers
        if buffer.role in (BufferRole.KEY, BufferRole.VALUE)
        and buffer.mapping is not PageMapping.HEAD_MAJOR
    ]
    found += [
        f"draft layer {spec.layer_id} has index keys; draft layers are never sparse"
        for spec in drafts
        if _has_index_keys(spec)
    ]
    if not sparse_layer_ids(specs):
        return tuple(found)
    found += [
        f"draft layer {spec.layer_id} is packed 4-bit; beside sparse layers it must be float8 or "
        "unquantised"
        for spec in drafts
        if spec.dtype is ElementType.PACKED4
    ]
    targets = {
        life_cycles[spec.layer_id]: spec.layer_id
        for spec in specs
        if spec.owner is KVCacheLayerOwner.TARGET
    }
    found += [
        f"draft layer {spec.layer_id} has the life cycle of target layer "
        f"{targets[life_cycles[spec.layer_id]]}, hence its pool; beside sparse layers give it a "
        "window or the policy optional"
        for spec in drafts
        if life_cycles[spec.layer_id] in targets
    ]
    return tuple(found)
