"""The books of pages that lie on another rank: slots are counted here, bytes are copied there."""

from __future__ import annotations

from typing_extensions import override

from kvcache_core.ports import PageCopier, SlotArray


class ElsewhereCopied(PageCopier):
    """Copies nothing: the rank that has the pages makes the same copies when it applies the log."""

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        """Done there."""

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Done there."""

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        """Done there."""
