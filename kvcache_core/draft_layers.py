"""Draft layers among the specs: their numbers, their element type, whether they are shared.

A drafter's layers are numbered behind all layers of the target's checkpoint, on every rank alike: a
pipeline stage that holds few target layers keeps the checkpoint's numbers. The owner of a layer is
what its spec says and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec, ReusePolicy

UNQUANTISED = frozenset({ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16})


def resolve_draft_dtype(declared: ElementType | str | None, weights: ElementType) -> ElementType:
    """The element type of draft KV. ``declared`` is the drafter's own wish; None is no wish.

    Without a wish draft KV has the type of the drafter's weights. FLOAT8_E4M3 is always possible;
    an unquantised type must be the weights'. Everything else raises ValueError, a wish that is not
    an element type at all too: an invalid declaration is not an absent one.
    """
    if weights not in UNQUANTISED:
        known = sorted(element.value for element in UNQUANTISED)
        raise ValueError(f"drafter weights must be one of {known}, got {weights.value}")
    if declared is None:
        return weights
    dtype = ElementType.named(declared) if isinstance(declared, str) else declared
    if not isinstance(dtype, ElementType):
        raise ValueError(  # noqa: TRY004  (a configuration error like the others)
            f"draft_kv_dtype must be an element type or the name of one, got {declared!r}"
        )
    if dtype is ElementType.FLOAT8_E4M3 or dtype is weights:
        return dtype
    if dtype in UNQUANTISED:
        raise ValueError(
            f"draft_kv_dtype {dtype.value} conflicts with drafter weights of {weights.value}; "
            "leave it out or declare float8_e4m3"
        )
    raise ValueError(
        f"draft_kv_dtype {dtype.value} is not possible; expected float8_e4m3 or {weights.value}"
    )


def draft_layer_range(
    num_target_layers: int, num_draft_layers: int, heads: int | Sequence[int]
) -> range:
    """Ids of the draft layers of a checkpoint, anchored on its number of target layers.

    ``heads`` is the kv head count of every layer, or a list: one entry a target layer, or target
    and draft layers together. Raises ValueError for a list of any other length, from which a tail
    would be guessed.
    """
    if num_target_layers < 1 or num_draft_layers < 0:
        raise ValueError(
            "expected at least one target layer and no negative number of draft layers, "
            f"got {num_target_layers} and {num_draft_layers}"
        )
    total = num_target_layers + num_draft_layers
    if not isinstance(heads, int) and len(heads) not in (num_target_layers, total):
        raise ValueError(
            f"{len(heads)} kv head counts fit neither {num_target_layers} target layers "
            f"nor {total} layers with drafts"
        )
    return range(num_target_layers, total)


def append_draft_layers(
    target: Sequence[KVCacheLayerSpec],
    draft: Sequence[KVCacheLayerSpec],
    *,
    num_target_layers: int,
) -> tuple[KVCacheLayerSpec, ...]:
    """Specs of target and drafter in one numbering: draft layer i becomes number of targets + i.

    ``num_target_layers`` counts the checkpoint, not this rank. Raises ValueError for a target layer
    outside it, or a spec with the wrong owner.
    """
    for spec in target:
        if spec.owner is not KVCacheLayerOwner.TARGET or spec.layer_id >= num_target_layers:
            raise ValueError(
                f"layer {spec.layer_id} ({spec.owner.value}) is none of the checkpoint's "
                f"{num_target_layers} target layers"
            )
    ids = draft_layer_range(num_target_layers, len(draft), 1)
    for spec in draft:
        if spec.owner is not KVCacheLayerOwner.DRAFT:
            raise ValueError(f"draft layer {spec.layer_id} has owner {spec.owner.value}")
    return (*target, *(replace(spec, layer_id=i) for i, spec in zip(ids, draft, strict=True)))


def with_private_drafts(specs: Sequence[KVCacheLayerSpec]) -> tuple[KVCacheLayerSpec, ...]:
    """The specs with sharing off: draft layers are neither reused nor transferred."""
    return tuple(
        replace(spec, policy=ReusePolicy.PRIVATE) if spec.owner is KVCacheLayerOwner.DRAFT else spec
        for spec in specs
    )
