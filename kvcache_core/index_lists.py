"""Which layers may read one list of page indices, and which lists a step must export.

A list is computed once for all layers of equal key: same layer group (same slots), same affine map,
same kv_factor and page geometry, same distance from keys to values. Kernels plan over a list, and a
plan made for pairs of pages is wrong for single ones, so kv_factor is in the key though the numbers
may agree. Layers that take raw slots need no list: they read the block table itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcache_core.address import BufferAddress, PageGeometry
from kvcache_core.index_space import IndexSpace
from kvcache_core.spec import BufferRole, IndexKind, KVCacheLayerSpec


@dataclass(frozen=True, kw_only=True)
class IndexListKey:
    """What two layers must have in common to read one list.

    ``value_offset`` is how far a value page's index lies behind its key page's, in pages; None for
    a layer without values.
    """

    layer_group: int
    kind: IndexKind
    scale: int
    bias: int
    kv_factor: int
    geometry: PageGeometry
    value_offset: int | None


@dataclass(frozen=True, kw_only=True)
class IndexList:
    """One list: ``space`` expands slots of ``layer_group`` to indices that ``layer_ids`` read."""

    key: IndexListKey
    space: IndexSpace
    layer_ids: tuple[int, ...]

    @property
    def layer_group(self) -> int:
        """The group whose block table the list is computed from."""
        return self.key.layer_group


def index_lists(
    specs: Iterable[KVCacheLayerSpec], addresses: Mapping[tuple[int, BufferRole], BufferAddress]
) -> tuple[IndexList, ...]:
    """The lists that these layers need, ordered by first layer; none for layers on raw slots.

    Raises ValueError for a layer whose pages do not tile its slots.
    """
    members: dict[IndexListKey, list[int]] = {}
    spaces: dict[IndexListKey, IndexSpace] = {}
    for spec in specs:
        if spec.is_recurrent or spec.index_kind is IndexKind.RAW_SLOT:
            continue
        key_address = addresses[spec.layer_id, BufferRole.KEY]
        space = IndexSpace.of(key_address, spec.index_kind)
        key = IndexListKey(
            layer_group=key_address.layer_group,
            kind=spec.index_kind,
            scale=space.scale,
            bias=space.bias,
            kv_factor=spec.kv_factor,
            geometry=key_address.geometry,
            value_offset=_value_offset(spec, addresses),
        )
        members.setdefault(key, []).append(spec.layer_id)
        spaces.setdefault(key, space)
    return tuple(
        IndexList(key=key, space=spaces[key], layer_ids=tuple(layers))
        for key, layers in members.items()
    )


def _value_offset(
    spec: KVCacheLayerSpec, addresses: Mapping[tuple[int, BufferRole], BufferAddress]
) -> int | None:
    if spec.kv_factor == 1:
        return None
    key = addresses[spec.layer_id, BufferRole.KEY]
    value = addresses[spec.layer_id, BufferRole.VALUE]
    return (value.offset_bytes - key.offset_bytes) // key.geometry.page_stride_bytes


def check_scales_follow_data(
    spec: KVCacheLayerSpec, addresses: Mapping[tuple[int, BufferRole], BufferAddress]
) -> None:
    """Data and scales of a layer have the same page indices, each in its own pool.

    Raises ValueError when layers without scales share the data's slots and move its indices.
    """
    if spec.scale_block_elements is None or spec.index_kind is IndexKind.RAW_SLOT:
        return
    pairs = (
        (BufferRole.KEY, BufferRole.KEY_SCALE),
        (BufferRole.VALUE, BufferRole.VALUE_SCALE),
    )
    for data_role, scale_role in pairs[: spec.kv_factor]:
        data = IndexSpace.of(addresses[spec.layer_id, data_role], spec.index_kind)
        scale = IndexSpace.of(addresses[spec.layer_id, scale_role], spec.index_kind)
        if (data.scale, data.bias) != (scale.scale, scale.bias):
            raise ValueError(
                f"layer {spec.layer_id}: {data_role.value} has index slot * {data.scale} + "
                f"{data.bias}, its scales slot * {scale.scale} + {scale.bias}; one page index must "
                "serve both: give the layers with scales a coalescing_group of their own"
            )
