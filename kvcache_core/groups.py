"""The parts of a layout plan: layer groups, pool groups and views. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_core.address import BufferAddress, PageGeometry
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.spec import KVCacheLayerOwner


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers whose pages live equally long. ``slot_bytes`` has one entry per pool of its pool
    group.
    """

    id: int
    life_cycle: LifeCycle
    layer_ids: tuple[int, ...]
    pool_group: int
    slot_bytes: tuple[int, ...]


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
