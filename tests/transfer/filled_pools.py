"""Numpy pools of a rank that hold the pages of one request, in slots of no order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from kvcache_core.arithmetic import ceil_div
from tests.transfer.page_values import Bytes, page_values
from transfer.rank_info import PageBuffer, PageGroup, PageView, RankInfo

PADDING = 0xEE
"""Content of every byte that nobody has written."""
Slots = npt.NDArray[np.int32]
Pools = dict[int, list[Bytes]]
"""By pool group, one a pool, each ``[slots, slot bytes]``."""


@dataclass(frozen=True, eq=False)
class HeldBuffer:
    """Live pages of one buffer of a request: slots, and block ordinals over the whole sequence."""

    view: PageView
    group: PageGroup
    buffer: PageBuffer
    slots: Slots
    ordinals: list[int]

    def data(self, pools: Pools) -> Bytes:
        """A view of the data bytes in all slots, ``[slots, pages, page bytes]``."""
        pool = pools[self.group.pool_group][self.view.pool]
        start = self.buffer.offset_bytes
        pages = pool[:, start : start + self.buffer.size_bytes].reshape(
            len(pool), self.view.pages_per_block, self.view.page_stride_bytes
        )
        return pages[:, :, : self.view.page_bytes]

    def values(self) -> Bytes:
        """What the data bytes in ``slots`` should be."""
        return page_values(self.view, self.buffer, self.ordinals)


class FilledPools:
    """Pools of one rank and the slots of one request; a slot of every pool group is nobody's."""

    def __init__(self, info: RankInfo, prompt_tokens: int, random: Random) -> None:
        self.info = info
        self.ordinals = {
            group.layer_group: _ordinals(info, group, prompt_tokens)
            for group in info.page_table.groups
        }
        self.slots: dict[int, Slots] = {}
        """By layer group: the slot of each of the rank's own blocks, -1 where it is not live."""
        self.pools: Pools = {}
        for pool_group in {group.pool_group for group in info.page_table.groups}:
            members = [g for g in info.page_table.groups if g.pool_group == pool_group]
            count = 1 + sum(len(self.ordinals[group.layer_group]) for group in members)
            free = random.sample(range(count), count)
            for group in members:
                self.slots[group.layer_group] = np.array(
                    [
                        free.pop() if _is_live(info, group, ordinal, prompt_tokens) else -1
                        for ordinal in self.ordinals[group.layer_group]
                    ],
                    dtype=np.int32,
                )
            self.pools[pool_group] = [
                np.full((count, size), PADDING, np.uint8) for size in members[0].slot_bytes
            ]

    def like(self, value: int) -> Pools:
        """Pools of the same shapes that hold ``value`` everywhere."""
        return {
            pool_group: [np.full_like(pool, value) for pool in pools]
            for pool_group, pools in self.pools.items()
        }

    def fill(self) -> None:
        """Write all data bytes of live blocks."""
        for held in self.buffers():
            held.data(self.pools)[held.slots] = held.values()

    def buffers(self) -> Iterator[HeldBuffer]:
        """Every buffer of the rank."""
        for view in self.info.page_table.views:
            slots = self.slots[view.layer_group]
            live = np.flatnonzero(slots >= 0)
            ordinals = [self.ordinals[view.layer_group][index] for index in live]
            group = self.info.page_table.group(view.layer_group)
            for buffer in view.buffers:
                yield HeldBuffer(view, group, buffer, slots[live], ordinals)


def _ordinals(info: RankInfo, group: PageGroup, prompt_tokens: int) -> list[int]:
    """The rank's own blocks; a state has one page."""
    if group.kind == "state":
        return [0]
    blocks = ceil_div(prompt_tokens, info.tokens_per_block)
    return list(range(info.shape.cp_rank, blocks, info.shape.cp_size))


def _is_live(info: RankInfo, group: PageGroup, ordinal: int, prompt_tokens: int) -> bool:
    if group.window is None or ordinal < group.sink_blocks:
        return True
    last_token = (ordinal + 1) * info.tokens_per_block - 1
    return last_token > prompt_tokens - group.window
