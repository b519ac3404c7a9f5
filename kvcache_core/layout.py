"""The layout plan: pools, slots and offsets of every buffer, derived once from the layer specs.

Pure, device free, deterministic; the only source of addresses. Slot-major: one block of one layer
group is one run of bytes in each pool of its pool group (slot id k is valid in all of them):

    pool     | slot 0                                     | slot 1 ...
    slot     | layer 0 KEY | layer 0 VALUE | layer 1 KEY | ...    buffers of one coalescing key
    buffer   | page 0 | page 1 | ...            tokens_per_block / tokens_per_page pages

Coalescing key: (life cycle, coalescing group, expanded size). Groups are numbered by their first
layer, pools by descending slot size, buffers inside a slot by layer and role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvcache_core.address import BufferAddress, PageGeometry
from kvcache_core.arithmetic import ceil_div
from kvcache_core.errors import invariant
from kvcache_core.groups import LayerGroup, PoolGroup, View
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.sizing import DEFAULT_DEMAND, SizingDemand, sequence_capacity_blocks, slots_for
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
)


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Where everything lies. Make it with :meth:`derive`; equal specs give equal plans."""

    specs: tuple[KVCacheLayerSpec, ...]
    tokens_per_block: int
    max_sequence_tokens: int | None
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PoolGroup, ...]
    views: tuple[View, ...]
    addresses: dict[tuple[int, BufferRole], BufferAddress] = field(repr=False, compare=False)

    @classmethod
    def derive(
        cls,
        specs: Sequence[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_sequence_tokens: int | None = None,
    ) -> LayoutPlan:
        """Derive the plan. Raises ValueError for specs that contradict each other or the block
        size.
        """
        return _build(specs, tokens_per_block, max_sequence_tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return ceil_div(tokens, self.tokens_per_block)

    def spec(self, layer_id: int) -> KVCacheLayerSpec:
        """The spec of one layer. Raises KeyError."""
        for spec in self.specs:
            if spec.layer_id == layer_id:
                return spec
        raise KeyError(
            f"no layer {layer_id}; the plan has {[spec.layer_id for spec in self.specs]}"
        )

    def address(self, layer_id: int, role: BufferRole) -> BufferAddress:
        """Address of one buffer. Raises KeyError naming what the layer has."""
        try:
            return self.addresses[layer_id, role]
        except KeyError:
            roles = [known.value for layer, known in self.addresses if layer == layer_id]
            raise KeyError(f"layer {layer_id} has no {role.value} buffer; it has {roles}") from None

    def layer_group_of(self, layer_id: int) -> LayerGroup:
        """The group a layer belongs to. Raises KeyError."""
        for group in self.layer_groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(f"no layer {layer_id} in this plan")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """All layers, target and draft, ascending."""
        return tuple(spec.layer_id for spec in self.specs)

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in all layers while none of its pages is stale (rounded up)."""
        attention = (group for group in self.layer_groups if not group.life_cycle.is_state)
        return ceil_div(sum(sum(group.slot_bytes) for group in attention), self.tokens_per_block)

    def pool_bytes(self, slots: Sequence[int]) -> int:
        """Bytes of pools that have ``slots`` slots per pool group."""
        return sum(
            count * group.bytes_per_slot
            for count, group in zip(slots, self.pool_groups, strict=True)
        )

    def slots_for(self, quota_bytes: int, demand: SizingDemand = DEFAULT_DEMAND) -> tuple[int, ...]:
        """Slots per pool group within ``quota_bytes``; ValueError when one chunk does not fit."""
        return slots_for(
            self.layer_groups, self.pool_groups, self.tokens_per_block, quota_bytes, demand
        )

    def resident_slots(self, tokens: int) -> tuple[int, ...]:
        """Slots per pool group that a sequence with ``tokens`` tokens of final KV occupies."""
        return tuple(
            sum(
                self.layer_groups[group].life_cycle.live_blocks(
                    tokens, tokens, self.tokens_per_block
                )
                for group in pool.layer_groups
            )
            for pool in self.pool_groups
        )

    def sequence_capacity_tokens(
        self, slots: Sequence[int], demand: SizingDemand = DEFAULT_DEMAND
    ) -> int:
        """Longest single sequence that pools of ``slots`` can hold, at most max_sequence_tokens."""
        blocks = sequence_capacity_blocks(
            self.layer_groups, self.pool_groups, self.tokens_per_block, slots, demand
        )
        tokens = blocks * self.tokens_per_block
        return tokens if self.max_sequence_tokens is None else min(tokens, self.max_sequence_tokens)

    def transferable_groups(self) -> tuple[int, ...]:
        """Layer groups whose pages may leave this rank."""
        return tuple(
            group.id
            for group in self.layer_groups
            if group.life_cycle.policy is not ReusePolicy.PRIVATE
        )


Coalesced = list[tuple[KVCacheLayerSpec, BufferSpec, PageGeometry]]


def _build(
    specs: Sequence[KVCacheLayerSpec], tokens_per_block: int, max_sequence_tokens: int | None
) -> LayoutPlan:
    """See :meth:`LayoutPlan.derive`."""
    ordered = _checked(specs, tokens_per_block, max_sequence_tokens)
    members: dict[LifeCycle, list[KVCacheLayerSpec]] = {}
    for spec in ordered:
        members.setdefault(LifeCycle.of(spec, tokens_per_block, max_sequence_tokens), []).append(
            spec
        )

    layer_groups: list[LayerGroup] = []
    pool_group_ids: dict[tuple[int, ...], int] = {}
    addresses: dict[tuple[int, BufferRole], BufferAddress] = {}
    for group_id, (life_cycle, layers) in enumerate(members.items()):
        pools = _coalesce(layers, tokens_per_block)
        slot_bytes = tuple(_slot_bytes(pool) for pool in pools)
        pool_group = pool_group_ids.setdefault(slot_bytes, len(pool_group_ids))
        layer_groups.append(
            LayerGroup(
                id=group_id,
                life_cycle=life_cycle,
                layer_ids=tuple(spec.layer_id for spec in layers),
                pool_group=pool_group,
                slot_bytes=slot_bytes,
            )
        )
        for pool_id, pool in enumerate(pools):
            offset = 0
            for spec, buffer, geometry in pool:
                addresses[spec.layer_id, buffer.role] = BufferAddress(
                    layer_id=spec.layer_id,
                    role=buffer.role,
                    layer_group=group_id,
                    pool_group=pool_group,
                    pool=pool_id,
                    offset_bytes=offset,
                    bytes=geometry.buffer_bytes,
                    slot_bytes=slot_bytes[pool_id],
                    geometry=geometry,
                )
                offset += geometry.buffer_bytes
    pool_groups = tuple(
        PoolGroup(
            id=pool_group,
            slot_bytes=slot_bytes,
            layer_groups=tuple(
                group.id for group in layer_groups if group.pool_group == pool_group
            ),
        )
        for slot_bytes, pool_group in pool_group_ids.items()
    )
    plan = LayoutPlan(
        specs=ordered,
        tokens_per_block=tokens_per_block,
        max_sequence_tokens=max_sequence_tokens,
        layer_groups=tuple(layer_groups),
        pool_groups=pool_groups,
        views=_views(ordered, layer_groups, addresses),
        addresses=addresses,
    )
    _check_disjoint(plan)
    return plan


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
    addresses: dict[tuple[int, BufferRole], BufferAddress],
) -> tuple[View, ...]:
    owners = {spec.layer_id: spec.owner for spec in specs}
    members: dict[tuple[KVCacheLayerOwner, int, int, PageGeometry], list[BufferAddress]] = {}
    for address in sorted(
        addresses.values(), key=lambda entry: (entry.layer_group, entry.pool, entry.offset_bytes)
    ):
        key = (owners[address.layer_id], address.layer_group, address.pool, address.geometry)
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


def _check_disjoint(plan: LayoutPlan) -> None:
    """Within each slot the buffers tile it exactly, and every buffer is in exactly one view."""
    covered: dict[tuple[int, int], int] = {}
    for address in sorted(
        plan.addresses.values(),
        key=lambda entry: (entry.layer_group, entry.pool, entry.offset_bytes),
    ):
        key = (address.layer_group, address.pool)
        invariant(
            address.offset_bytes == covered.get(key, 0),
            f"layer {address.layer_id} {address.role.value} starts at {address.offset_bytes} in "
            f"its slot, expected {covered.get(key, 0)}",
        )
        covered[key] = address.offset_bytes + address.bytes
    for group in plan.layer_groups:
        for pool, slot_bytes in enumerate(group.slot_bytes):
            invariant(
                covered[group.id, pool] == slot_bytes,
                f"layer group {group.id} pool {pool} has a gap",
            )
    invariant(
        sum(len(view.buffers) for view in plan.views) == len(plan.addresses),
        "views do not partition the buffers",
    )
