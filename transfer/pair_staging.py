"""What one pair needs to stage: its copy plans, its buffers, and the memory's two passes."""

from __future__ import annotations

from typing import Any, Final

from transfer.copy_plan import CopyPlan
from transfer.page_staging import PageStaging
from transfer.passes import PassOver
from transfer.plan import TransferPlan
from transfer.region import Staged
from transfer.staged_cut import most_bytes
from transfer.staging_buffers import StagingBuffers


class PairStaging:
    """Made once a pair, for a plan that has groups. ``gather`` is the sender's, ``scatter`` the
    receiver's; both raise ValueError for slots that are not there, and are over when ``over`` is
    called.
    """

    def __init__(self, plan: TransferPlan, staging: PageStaging) -> None:
        largest = max(most_bytes(group.block_bytes, plan.message_bytes) for group in plan.groups)
        self.buffers: Final = StagingBuffers(staging, largest)
        self._groups = plan.groups
        self._copies = tuple(CopyPlan.of(group) for group in plan.groups)
        self._staging = staging

    def gather(self, piece: Staged, message: Any, over: PassOver) -> None:
        """Fill ``message`` from the sender's slots of ``piece``."""
        pool_group = self._groups[piece.group].sender.pool_group
        self._staging.gather(self._copies[piece.group], pool_group, piece.slots, message, over)

    def scatter(self, piece: Staged, message: Any, over: PassOver) -> None:
        """Fill the receiver's slots of ``piece`` from ``message``."""
        pool_group = self._groups[piece.group].receiver.pool_group
        self._staging.scatter(self._copies[piece.group], message, pool_group, piece.slots, over)
