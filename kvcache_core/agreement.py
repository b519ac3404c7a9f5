"""Whether layer specs agree with what a rank's model declares, and with each other.

Specs decide how bytes are laid out, a model how it reads them: both must mean the same layers. All
mismatches are found at once, each with both values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvcache_core.spec import ElementType, KVCacheLayerSpec


@dataclass(frozen=True, kw_only=True)
class LayerDeclaration:
    """What the model of a rank says about one of its layers. Recurrent layers have zeros."""

    layer_id: int
    num_kv_heads: int
    head_dim: int
    kv_factor: int
    dtype: ElementType


@dataclass(frozen=True)
class SpecMismatch:
    """One fact on which a spec and a declaration differ."""

    layer_id: int
    fact: str
    spec: str
    declared: str

    @override
    def __str__(self) -> str:
        return f"layer {self.layer_id} {self.fact}: spec {self.spec}, model {self.declared}"


def spec_mismatches(
    specs: Sequence[KVCacheLayerSpec], declared: Sequence[LayerDeclaration]
) -> tuple[SpecMismatch, ...]:
    """Every mismatch, by layer: placement on this rank, kv heads, head_dim, kv_factor, dtype."""
    by_id = {spec.layer_id: spec for spec in specs}
    declarations = {layer.layer_id: layer for layer in declared}
    found: list[SpecMismatch] = []
    for layer_id in sorted(by_id.keys() | declarations.keys()):
        spec, layer = by_id.get(layer_id), declarations.get(layer_id)
        if spec is None or layer is None:
            places = [_place(side is not None) for side in (spec, layer)]
            found.append(SpecMismatch(layer_id, "placement", *places))
            continue
        facts = (
            ("num_kv_heads", spec.num_kv_heads, layer.num_kv_heads),
            ("head_dim", spec.head_dim, layer.head_dim),
            ("kv_factor", spec.kv_factor, layer.kv_factor),
            ("dtype", spec.dtype.value, layer.dtype.value),
        )
        found.extend(
            SpecMismatch(layer_id, fact, str(ours), str(theirs))
            for fact, ours, theirs in facts
            if ours != theirs
        )
    return tuple(found)


def _place(here: object) -> str:
    return "on this rank" if here else "not on this rank"


def require_agreement(
    specs: Sequence[KVCacheLayerSpec], declared: Sequence[LayerDeclaration]
) -> None:
    """Raise ValueError that lists every mismatch."""
    found = spec_mismatches(specs, declared)
    if found:
        lines = "; ".join(str(mismatch) for mismatch in found)
        raise ValueError(f"layer specs contradict the model: {lines}; derive both from one source")


def require_relocatable(specs: Sequence[KVCacheLayerSpec]) -> None:
    """Refuse to move accepted draft tokens between positions unless all layers are laid out alike.

    One pass over all layers moves rows of one size; a layer of other dtype, kv_factor, heads or
    page size would be torn, and a state has no rows. Raises ValueError naming what differs.
    """
    states = [spec.layer_id for spec in specs if spec.is_recurrent]
    if states:
        raise ValueError(f"tokens cannot be relocated in recurrent layers {states}")
    facts: dict[str, set[object]] = {
        "dtype": {spec.dtype.value for spec in specs},
        "kv_factor": {spec.kv_factor for spec in specs},
        "num_kv_heads": {spec.num_kv_heads for spec in specs},
        "head_dim": {spec.head_dim for spec in specs},
        "tokens_per_page": {spec.tokens_per_page for spec in specs},
        "buffers": {tuple(buffer.role.value for buffer in spec.buffers) for spec in specs},
    }
    mixed = {fact: sorted(map(str, values)) for fact, values in facts.items() if len(values) > 1}
    if mixed:
        raise ValueError(
            f"tokens cannot be relocated in layers that differ in {mixed}; verify a chain of "
            "tokens instead of a tree, or make the layers alike"
        )
