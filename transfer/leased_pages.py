"""Slots of a lease as the sessions of a request see them, one entry a group of the session's plan.

Blocks count over the whole sequence. A state, of which a lease has one slot, stands at the prompt's
last block: it moves with that one, once. A pulled prefix (``prompt_tokens`` None) ends with its
lease. Blocks that the sender of a session does not hold, since context parallel ranks share them
out, are not wanted from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache_core.arithmetic import ceil_div
from transfer.lease import GroupBlocks, LeasedBlocks, TransferLease
from transfer.plan import GroupSide, TransferPlan

Slots = npt.NDArray[np.int32]


class LeasedPages:
    """Reads leases of one rank. ``views`` is a view id by layer group (:func:`views_of_groups`)."""

    def __init__(self, views: Mapping[int, int]) -> None:
        self._views: Final = views

    def to_send(
        self, plan: TransferPlan, lease: TransferLease, prompt_tokens: int | None
    ) -> LeasedBlocks:
        """For a context session. Raises ValueError for a state of other than one slot."""
        return LeasedBlocks(
            lease,
            tuple(
                GroupBlocks(lease.first_block, self._slots(group.sender, lease, prompt_tokens))
                for group in plan.groups
            ),
        )

    def to_receive(
        self, plan: TransferPlan, lease: TransferLease, prompt_tokens: int | None
    ) -> LeasedBlocks:
        """For a generation session. Raises likewise."""
        groups = []
        for group in plan.groups:
            slots = self._slots(group.receiver, lease, prompt_tokens)
            held = group.sender.held
            if held.cp_size > 1 and not held.life_cycle.is_state:
                ordinals = np.arange(lease.first_block, lease.end_block)
                slots = np.where(ordinals % held.cp_size == held.cp_rank, slots, np.int32(-1))
            groups.append(GroupBlocks(lease.first_block, slots))
        return LeasedBlocks(lease, tuple(groups))

    def _slots(self, side: GroupSide, lease: TransferLease, prompt_tokens: int | None) -> Slots:
        slots = lease.slots(self._views[side.layer_group])
        if not side.held.life_cycle.is_state:
            return slots
        if len(slots) != 1:
            raise ValueError(
                f"layer group {side.layer_group}: expected one slot of a state, got {len(slots)}"
            )
        table = np.full(lease.end_block - lease.first_block, -1, dtype=np.int32)
        last = lease.end_block
        if prompt_tokens is not None:
            last = ceil_div(prompt_tokens, side.held.tokens_per_block)
        if len(table) and lease.end_block == last:
            table[-1] = slots[0]
        return table
