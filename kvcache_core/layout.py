"""The layout plan: pools, slots and offsets of every buffer, derived once from the layer specs.

Pure, device free, deterministic; the only source of addresses, index spaces, costs, quotas and
estimates. Slot-major: one block of one layer group is one run of bytes in each pool of its pool
group (slot id k is valid in all of them):

    pool     | slot 0                                     | slot 1 ...
    slot     | layer 0 KEY | layer 0 VALUE | layer 1 KEY | ...    buffers of one coalescing key
    buffer   | page 0 | page 1 | ...            tokens_per_block / tokens_per_page pages

grouping.py has the derivation, sizing.py and its neighbours the arithmetic of quotas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache_core.address import BufferAddress
from kvcache_core.arithmetic import ceil_div
from kvcache_core.costs import CostClass, cost_classes
from kvcache_core.grouping import derive_groups
from kvcache_core.groups import GroupTable, LayerGroup, PoolGroup, View
from kvcache_core.index_lists import IndexList, index_lists
from kvcache_core.index_space import IndexSpace
from kvcache_core.sizing import (
    host_slots_for,
    least_counts,
    quota_for_tokens,
    sequence_capacity_blocks,
    slots_for,
)
from kvcache_core.sizing_demand import DEFAULT_DEMAND, BatchStep, SizingDemand
from kvcache_core.sizing_estimate import CacheEstimate, estimate
from kvcache_core.spec import (
    BufferRole,
    IndexKind,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
    layer_ids,
    owner_of,
)


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Where everything lies. Make it with :meth:`derive`; equal specs give equal plans."""

    specs: tuple[KVCacheLayerSpec, ...]
    max_sequence_tokens: int | None
    table: GroupTable
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
        grouping = derive_groups(specs, tokens_per_block, max_sequence_tokens)
        return cls(
            specs=grouping.specs,
            max_sequence_tokens=max_sequence_tokens,
            table=grouping.table,
            views=grouping.views,
            addresses=grouping.addresses,
        )

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self.table.tokens_per_block

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers that live equally long, numbered by their first layer."""
        return self.table.layer_groups

    @property
    def pool_groups(self) -> tuple[PoolGroup, ...]:
        """Layer groups with equal slot sizes."""
        return self.table.pool_groups

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

    def owner(self, layer_id: int) -> KVCacheLayerOwner:
        """Owner of one layer, as its spec says. Raises KeyError."""
        return owner_of(self.specs, layer_id)

    @property
    def draft_layer_ids(self) -> tuple[int, ...]:
        """Layers of the drafter, ascending."""
        return layer_ids(self.specs, KVCacheLayerOwner.DRAFT)

    def address(self, layer_id: int, role: BufferRole) -> BufferAddress:
        """Address of one buffer. Raises KeyError naming what the layer has."""
        try:
            return self.addresses[layer_id, role]
        except KeyError:
            roles = [known.value for layer, known in self.addresses if layer == layer_id]
            raise KeyError(f"layer {layer_id} has no {role.value} buffer; it has {roles}") from None

    def index_space(self, layer_id: int, role: BufferRole) -> IndexSpace:
        """The space in which the layer's kernels count this buffer's pages.

        Extra buffers and states are counted in slots. Raises KeyError like :meth:`address`.
        """
        spec = self.spec(layer_id)
        extra = any(buffer.role is role for buffer in (*spec.extra_buffers, *spec.state_buffers))
        kind = IndexKind.RAW_SLOT if extra else spec.index_kind
        return IndexSpace.of(self.address(layer_id, role), kind)

    def index_lists(self, layers: Sequence[int]) -> tuple[IndexList, ...]:
        """The lists of page indices that kernels of these layers read, and no others."""
        return index_lists([self.spec(layer) for layer in layers], self.addresses)

    def drafter_lists(self) -> tuple[IndexList, ...]:
        """What a step exports for a drafter: the list of its first attention layer, one pool.

        Other draft layers of that group follow from it by their own base or bias. Empty without
        draft attention layers, or when they take raw slots.
        """
        attention = [layer for layer in self.draft_layer_ids if not self.spec(layer).is_recurrent]
        return self.index_lists(attention[:1])

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
        return ceil_div(sum(group.bytes_per_slot for group in attention), self.tokens_per_block)

    @property
    def cost_classes(self) -> tuple[CostClass, ...]:
        """Layers that cost alike: one class per life cycle (window, sinks, policy) and owner."""
        return cost_classes(self.specs, self.table, self.addresses)

    def pool_bytes(self, slots: Sequence[int]) -> int:
        """Bytes of pools that have ``slots`` slots per pool group."""
        return sum(
            count * group.bytes_per_slot
            for count, group in zip(slots, self.pool_groups, strict=True)
        )

    def slots_for(self, quota_bytes: int, demand: SizingDemand = DEFAULT_DEMAND) -> tuple[int, ...]:
        """Slots per pool group within ``quota_bytes``; ValueError when one chunk does not fit."""
        return slots_for(self.table, quota_bytes, demand)

    def floor_slots(self, demand: SizingDemand = DEFAULT_DEMAND) -> tuple[int, ...]:
        """Slots per pool group of the smallest pools that :meth:`slots_for` makes."""
        return self.table.pool_slots(least_counts(self.table, demand))

    def host_slots_for(self, quota_bytes: int, device_slots: Sequence[int]) -> tuple[int, ...]:
        """Slots per pool group of a host tier, in the proportions of the device's; zeros where the
        quota holds not one slot of each.
        """
        return host_slots_for(self.table, quota_bytes, device_slots)

    def estimate(self, quota_bytes: int, demand: SizingDemand = DEFAULT_DEMAND) -> CacheEstimate:
        """What pools of this quota will hold; its slots are those of :meth:`slots_for`."""
        return estimate(self.table, quota_bytes, demand)

    def quota_for_tokens(self, tokens: int, demand: SizingDemand = DEFAULT_DEMAND) -> int:
        """The least quota whose estimate holds ``tokens`` tokens."""
        return quota_for_tokens(self.table, tokens, demand)

    def step_slots(self, step: BatchStep) -> tuple[int, ...]:
        """Slots per pool group that all sequences of a step hold, each group counted."""
        return self.table.pool_slots(step.slots(self.table))

    def resident_slots(self, tokens: int) -> tuple[int, ...]:
        """Slots per pool group that a sequence with ``tokens`` tokens of final KV occupies."""
        return self.step_slots(BatchStep(((tokens, tokens),)))

    def sequence_capacity_tokens(
        self, slots: Sequence[int], demand: SizingDemand = DEFAULT_DEMAND
    ) -> int:
        """Longest single sequence that pools of ``slots`` can hold, at most max_sequence_tokens."""
        tokens = sequence_capacity_blocks(self.table, slots, demand) * self.tokens_per_block
        return tokens if self.max_sequence_tokens is None else min(tokens, self.max_sequence_tokens)

    def layer_blocks(self, layer_id: int, slots: Sequence[int]) -> int:
        """Blocks of one layer that ``slots`` free slots per pool group could hold.

        A slot is a block whatever the layer keeps in it: keys alone do not halve it.
        """
        return slots[self.layer_group_of(layer_id).pool_group]

    def transferable_groups(self) -> tuple[int, ...]:
        """Layer groups whose pages may leave this rank."""
        return tuple(
            group.id
            for group in self.layer_groups
            if group.life_cycle.policy is not ReusePolicy.PRIVATE
        )
