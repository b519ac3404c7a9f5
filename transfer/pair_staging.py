"""What one pair needs to stage: its copy plans, its buffers, and the memory's two passes."""

from __future__ import annotations

from typing import Any, Final

from transfer.copy_plan import CopyPlan
from transfer.page_staging import PageStaging
from transfer.passes import PassOver
from transfer.plan import TransferPlan
from transfer.region import Region, Staged
from transfer.runs import consecutive
from transfer.staged_cut import most_bytes
from transfer.staging_buffers import StagingBuffers


class PairStaging:
    """Made once a pair, for a plan that has groups. ``gather`` is the sender's, ``scatter`` the
    receiver's; both raise ValueError for slots that are not there, and are over when ``over`` is
    called. Neither is needed where ``sent_from`` or ``received_into`` knows of a region.
    """

    def __init__(self, plan: TransferPlan, staging: PageStaging) -> None:
        largest = max(most_bytes(group.block_bytes, plan.message_bytes) for group in plan.groups)
        self.buffers: Final = StagingBuffers(staging, largest)
        self._groups = plan.groups
        self._copies = tuple(CopyPlan.of(group) for group in plan.groups)
        self._sender_pools = tuple(copy.sender_pool for copy in self._copies)
        self._receiver_pools = tuple(copy.receiver_pool for copy in self._copies)
        self._staging = staging

    def sent_from(self, piece: Staged) -> Region | None:
        """The sender's slots where they are the message as they lie: whole and neighbours."""
        group = self._groups[piece.group].sender
        return _as_it_lies(group.pool_group, self._sender_pools[piece.group], piece)

    def received_into(self, piece: Staged) -> Region | None:
        """The same of the receiver's slots."""
        group = self._groups[piece.group].receiver
        return _as_it_lies(group.pool_group, self._receiver_pools[piece.group], piece)

    def gather(self, piece: Staged, message: Any, over: PassOver) -> None:
        """Fill ``message`` from the sender's slots of ``piece``."""
        pool_group = self._groups[piece.group].sender.pool_group
        self._staging.gather(self._copies[piece.group], pool_group, piece.slots, message, over)

    def scatter(self, piece: Staged, message: Any, over: PassOver) -> None:
        """Fill the receiver's slots of ``piece`` from ``message``."""
        pool_group = self._groups[piece.group].receiver.pool_group
        self._staging.scatter(self._copies[piece.group], message, pool_group, piece.slots, over)


def _as_it_lies(pool_group: int, pool: int | None, piece: Staged) -> Region | None:
    if pool is None or not consecutive(piece.slots):
        return None
    return Region(pool_group, pool, int(piece.slots[0]), len(piece.slots))
