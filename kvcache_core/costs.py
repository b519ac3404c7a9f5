"""What layers cost: bytes per token while they grow, fixed bytes per sequence where they do not.

Layers of one window but other sinks, policy or owner are other classes: their blocks live otherwise
and are never exchanged. Bytes are those of the plan's addresses, page padding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcache_core.address import BufferAddress
from kvcache_core.arithmetic import ceil_div
from kvcache_core.groups import GroupTable
from kvcache_core.life_cycle import LifeCycle
from kvcache_core.spec import BufferRole, KVCacheLayerOwner, KVCacheLayerSpec, owner_of


@dataclass(frozen=True, kw_only=True)
class CostClass:
    """Layers of one owner in one layer group. ``layer_bytes`` are bytes of a block (or of the
    state) of each layer.
    """

    layer_group: int
    owner: KVCacheLayerOwner
    life_cycle: LifeCycle
    layer_ids: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    tokens_per_block: int

    @property
    def token_bytes(self) -> int:
        """Bytes a token adds while nothing is stale, rounded up; 0 for states."""
        if self.life_cycle.is_state:
            return 0
        return ceil_div(sum(self.layer_bytes), self.tokens_per_block)

    def fixed_bytes(self, append_tokens: int) -> int:
        """Bytes that a long sequence keeps however long it is; 0 for full attention.

        Each windowed layer's allocation is rounded to whole blocks by itself.
        """
        if self.life_cycle.is_full:
            return 0
        if self.life_cycle.is_state:
            return sum(self.layer_bytes)
        blocks = self.life_cycle.most_live_blocks(append_tokens, self.tokens_per_block)
        return sum(blocks * size for size in self.layer_bytes)


@dataclass(frozen=True, kw_only=True)
class CostComponents:
    """Bytes of one sequence, by what they grow with."""

    token_bytes: int
    """Per token, full-attention layers: grows for ever."""
    windowed_token_bytes: int
    """Per token, windowed layers: until the window is full."""
    window_bytes: int
    """Per sequence: all windows once they are full."""
    state_bytes: int
    """Per sequence: recurrent states."""


def cost_classes(
    specs: Sequence[KVCacheLayerSpec],
    table: GroupTable,
    addresses: Mapping[tuple[int, BufferRole], BufferAddress],
) -> tuple[CostClass, ...]:
    """One class per layer group and owner, in that order."""
    layer_bytes: dict[int, int] = {}
    for address in addresses.values():
        layer_bytes[address.layer_id] = layer_bytes.get(address.layer_id, 0) + address.bytes
    classes: list[CostClass] = []
    for group in table.layer_groups:
        for owner in KVCacheLayerOwner:
            layers = tuple(layer for layer in group.layer_ids if owner_of(specs, layer) is owner)
            if layers:
                classes.append(
                    CostClass(
                        layer_group=group.id,
                        owner=owner,
                        life_cycle=group.life_cycle,
                        layer_ids=layers,
                        layer_bytes=tuple(layer_bytes[layer] for layer in layers),
                        tokens_per_block=table.tokens_per_block,
                    )
                )
    return tuple(classes)


def cost_components(classes: Sequence[CostClass], append_tokens: int = 1) -> CostComponents:
    """The sum over ``classes``: all of a plan's, or one owner's."""
    full = [entry for entry in classes if entry.life_cycle.is_full]
    states = [entry for entry in classes if entry.life_cycle.is_state]
    windowed = [entry for entry in classes if entry.life_cycle.window is not None]
    return CostComponents(
        token_bytes=sum(entry.token_bytes for entry in full),
        windowed_token_bytes=sum(entry.token_bytes for entry in windowed),
        window_bytes=sum(entry.fixed_bytes(append_tokens) for entry in windowed),
        state_bytes=sum(entry.fixed_bytes(append_tokens) for entry in states),
    )
