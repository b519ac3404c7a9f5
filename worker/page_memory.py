"""Slots of the storage as memory that a transport can send from and receive into."""

from __future__ import annotations

from typing_extensions import override

from kvcache_core.storage import TorchStorage
from transfer.page_staging import HostStaging, PageStaging
from transfer.transport import PageMemory


class StoragePages(PageMemory):
    """Views of the pools, never copies: numpy arrays on the host, tensors on a device.

    Pages on a device cannot be staged yet.
    """

    def __init__(self, storage: TorchStorage) -> None:
        self._on_host = storage.device.type == "cpu"
        self._storage = storage
        self._staging = _host_staging(storage) if self._on_host else None

    @property
    @override
    def staging(self) -> PageStaging | None:
        return self._staging

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        slots = self._storage.pool_bytes(pool_group, pool)
        run = slots[first_slot : first_slot + num_slots].view(-1)
        return run.numpy() if self._on_host else run


def _host_staging(storage: TorchStorage) -> HostStaging:
    return HostStaging(
        {
            number: [
                storage.pool_bytes(number, pool).numpy() for pool in range(len(group.slot_bytes))
            ]
            for number, group in enumerate(storage.plan.pool_groups)
        }
    )
