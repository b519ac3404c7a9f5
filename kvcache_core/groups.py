"""The parts of a layout plan: layer groups, pool groups and views. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.address import BufferAddress, PageGeometry
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.spec import KVCacheLayerOwner


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers whose pages live equally long. ``slot_bytes`` has one entry per pool of its pool
    group; ``draft_layer_ids`` are those of its layers that belong to the drafter.
    """

    id: int
    life_cycle: LifeCycle
    layer_ids: tuple[int, ...]
    draft_layer_ids: tuple[int, ...]
    pool_group: int
    slot_bytes: tuple[int, ...]

    @property
    def is_draft(self) -> bool:
        """True when all layers are the drafter's."""
        return len(self.draft_layer_ids) == len(self.layer_ids)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all pools: of a block, or of a state."""
        return sum(self.slot_bytes)


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Layer groups with equal slot sizes; one pool per entry of ``slot_bytes`` (descending), in
    lockstep.
    """

    id: int
    slot_bytes: tuple[int, ...]
    layer_groups: tuple[int, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all pools."""
        return sum(self.slot_bytes)


@dataclass(frozen=True, kw_only=True)
class View:
    """The unit of transfer: the buffers of one owner, layer group and page geometry, in one pool.

    ``buffers`` are ordered by offset. ``whole_slot`` tells that they fill the slot without a gap,
    so that equal geometry on both sides moves whole slots.
    """

    id: int
    owner: KVCacheLayerOwner
    layer_group: int
    pool_group: int
    pool: int
    geometry: PageGeometry
    buffers: tuple[BufferAddress, ...]
    slot_bytes: int
    transferable: bool

    @property
    def whole_slot(self) -> bool:
        """True when the view's buffers are all of the slot."""
        return sum(buffer.bytes for buffer in self.buffers) == self.slot_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this view."""
        return sum(buffer.bytes for buffer in self.buffers)


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """All groups of a plan: what sizing works on. Counts are per layer group unless said."""

    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PoolGroup, ...]
    tokens_per_block: int

    def pool_slots(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Slots per pool group of slots per layer group."""
        return tuple(sum(counts[group] for group in pool.layer_groups) for pool in self.pool_groups)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Bytes of slots per layer group."""
        return sum(
            count * group.bytes_per_slot
            for count, group in zip(counts, self.layer_groups, strict=True)
        )

    @property
    def target_groups(self) -> tuple[LayerGroup, ...]:
        """Groups with a target layer."""
        return tuple(group for group in self.layer_groups if not group.is_draft)

    @property
    def draft_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the drafter alone."""
        return tuple(group for group in self.layer_groups if group.is_draft)
