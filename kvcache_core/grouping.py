"""Specs to groups, pools, offsets and views: the derivation behind the layout plan.

Coalescing key: (life cycle, coalescing group, expanded size). Groups are numbered by their first
layer, pools by descending slot size, buffers inside a slot by layer and role. Everything is checked
when it is made: buffers tile their slots, views partition them, and the index space that each layer
asks for goes there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcache_core.address import BufferAddress, PageGeometry
from kvcache_core.errors import invariant
from kvcache_core.groups import GroupTable, LayerGroup, PoolGroup, View
from kvcache_core.index_lists import check_scales_follow_data
from kvcache_core.index_space import IndexSpace
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.sparse import draft_conflicts
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    IndexKind,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
    owner_of,
)

Addresses = dict[tuple[int, BufferRole], BufferAddress]
Coalesced = list[tuple[KVCacheLayerSpec, BufferSpec, PageGeometry]]


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What :func:`derive_groups` makes of specs. ``specs`` are ordered by layer id."""

    specs: tuple[KVCacheLayerSpec, ...]
    table: GroupTable
    views: tuple[View, ...]
    addresses: Addresses


def derive_groups(
    specs: Sequence[KVCacheLayerSpec], tokens_per_block: int, max_sequence_tokens: int | None
) -> Grouping:
    """Group specs. Raises ValueError for specs that contradict each other or the block size."""
    ordered = _checked(specs, tokens_per_block, max_sequence_tokens)
    life_cycles = {
        spec.layer_id: LifeCycle.of(spec, tokens_per_block, max_sequence_tokens) for spec in ordered
    }
    conflicts = draft_conflicts(ordered, life_cycles)
    if conflicts:
        raise ValueError("; ".join(conflicts))
    members: dict[LifeCycle, list[KVCacheLayerSpec]] = {}
    for spec in ordered:
        members.setdefault(life_cycles[spec.layer_id], []).append(spec)

    layer_groups: list[LayerGroup] = []
    pool_group_ids: dict[tuple[int, ...], int] = {}
    addresses: Addresses = {}
    for group_id, (life_cycle, layers) in enumerate(members.items()):
        pools = _coalesce(layers, tokens_per_block)
        slot_bytes = tuple(_slot_bytes(pool) for pool in pools)
        group = LayerGroup(
            id=group_id,
            life_cycle=life_cycle,
            layer_ids=tuple(spec.layer_id for spec in layers),
            draft_layer_ids=tuple(
                spec.layer_id for spec in layers if spec.owner is KVCacheLayerOwner.DRAFT
            ),
            pool_group=pool_group_ids.setdefault(slot_bytes, len(pool_group_ids)),
            slot_bytes=slot_bytes,
        )
        layer_groups.append(group)
        for pool_id, pool in enumerate(pools):
            _place(pool, group, pool_id, addresses)
    table = GroupTable(
        layer_groups=tuple(layer_groups),
        pool_groups=_pool_groups(layer_groups, pool_group_ids),
        tokens_per_block=tokens_per_block,
    )
    views = _views(ordered, layer_groups, addresses)
    _check_disjoint(layer_groups, views, addresses)
    _check_index_spaces(ordered, addresses)
    return Grouping(specs=ordered, table=table, views=views, addresses=addresses)


def _place(pool: Coalesced, group: LayerGroup, pool_id: int, addresses: Addresses) -> None:
    """Buffers of one pool, one behind the other."""
    offset = 0
    for spec, buffer, geometry in pool:
        addresses[spec.layer_id, buffer.role] = BufferAddress(
            layer_id=spec.layer_id,
            role=buffer.role,
            layer_group=group.id,
            pool_group=group.pool_group,
            pool=pool_id,
            offset_bytes=offset,
            bytes=geometry.buffer_bytes,
            slot_bytes=group.slot_bytes[pool_id],
            geometry=geometry,
        )
        offset += geometry.buffer_bytes


def _pool_groups(
    layer_groups: Sequence[LayerGroup], ids: dict[tuple[int, ...], int]
) -> tuple[PoolGroup, ...]:
    return tuple(
        PoolGroup(
            id=pool_group,
            slot_bytes=slot_bytes,
            layer_groups=tuple(
                group.id for group in layer_groups if group.pool_group == pool_group
            ),
        )
        for slot_bytes, pool_group in ids.items()
    )


def _checked(
    specs: Sequence[KVCacheLayerSpec], tokens_per_block: int, max_sequence_tokens: int | None
) -> tuple[KVCacheLayerSpec, ...]:
    if not specs:
        raise ValueError("a layout plan needs at least one layer spec")
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block must be positive, got {tokens_per_block}")
    if max_sequence_tokens is not None and max_sequence_tokens < 1:
        raise ValueError(f"max_sequence_tokens must be positive or None, got {max_sequence_tokens}")
    ordered = tuple(sorted(specs, key=lambda spec: spec.layer_id))
    for left, right in pairwise(ordered):
        if left.layer_id == right.layer_id:
            raise ValueError(
                f"layer id {left.layer_id} occurs twice ({left.owner.value}, {right.owner.value}); "
                "number draft layers after the target's"
            )
    return ordered


def _coalesce(layers: Sequence[KVCacheLayerSpec], tokens_per_block: int) -> list[Coalesced]:
    by_key: dict[tuple[int, int], Coalesced] = {}
    for spec in layers:
        for buffer in spec.buffers:
            geometry = PageGeometry.of(buffer, tokens_per_block)
            key = (buffer.coalescing_group, geometry.buffer_bytes)
            by_key.setdefault(key, []).append((spec, buffer, geometry))
    return [
        pool
        for _, pool in sorted(by_key.items(), key=lambda item: (-_slot_bytes(item[1]), item[0]))
    ]


def _slot_bytes(pool: Coalesced) -> int:
    return sum(geometry.buffer_bytes for _, _, geometry in pool)


def _views(
    specs: Sequence[KVCacheLayerSpec],
    groups: Sequence[LayerGroup],
    addresses: Addresses,
) -> tuple[View, ...]:
    members: dict[tuple[KVCacheLayerOwner, int, int, PageGeometry], list[BufferAddress]] = {}
    for address in sorted(
        addresses.values(), key=lambda entry: (entry.layer_group, entry.pool, entry.offset_bytes)
    ):
        owner = owner_of(specs, address.layer_id)
        key = (owner, address.layer_group, address.pool, address.geometry)
        members.setdefault(key, []).append(address)
    return tuple(
        View(
            id=view_id,
            owner=owner,
            layer_group=group_id,
            pool_group=groups[group_id].pool_group,
            pool=pool,
            geometry=geometry,
            buffers=tuple(buffers),
            slot_bytes=groups[group_id].slot_bytes[pool],
            transferable=groups[group_id].life_cycle.policy is not ReusePolicy.PRIVATE,
        )
        for view_id, ((owner, group_id, pool, geometry), buffers) in enumerate(members.items())
    )


def _check_disjoint(
    layer_groups: Sequence[LayerGroup], views: Sequence[View], addresses: Addresses
) -> None:
    """Within each slot the buffers tile it exactly, and every buffer is in exactly one view."""
    covered: dict[tuple[int, int], int] = {}
    for address in sorted(
        addresses.values(),
        key=lambda entry: (entry.layer_group, entry.pool, entry.offset_bytes),
    ):
        key = (address.layer_group, address.pool)
        invariant(
            address.offset_bytes == covered.get(key, 0),
            f"layer {address.layer_id} {address.role.value} starts at {address.offset_bytes} in "
            f"its slot, expected {covered.get(key, 0)}",
        )
        covered[key] = address.offset_bytes + address.bytes
    for group in layer_groups:
        for pool, slot_bytes in enumerate(group.slot_bytes):
            invariant(
                covered[group.id, pool] == slot_bytes,
                f"layer group {group.id} pool {pool} has a gap",
            )
    invariant(
        sum(len(view.buffers) for view in views) == len(addresses),
        "views do not partition the buffers",
    )


def _check_index_spaces(specs: Sequence[KVCacheLayerSpec], addresses: Addresses) -> None:
    """Every buffer has raw slots; keys, values and scales have the space that the layer asks for.

    Extra buffers are read by slot whatever the layer's kind: their pages may tile no slot.
    """
    for address in addresses.values():
        IndexSpace.of(address, IndexKind.RAW_SLOT)
    for spec in specs:
        if spec.index_kind is IndexKind.RAW_SLOT:
            continue
        extra = {buffer.role for buffer in spec.extra_buffers}
        for buffer in spec.buffers:
            if buffer.role not in extra:
                IndexSpace.of(addresses[spec.layer_id, buffer.role], spec.index_kind)
        check_scales_follow_data(spec, addresses)
