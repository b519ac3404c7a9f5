"""Slots of the storage as memory that a transport can send from and receive into."""

from __future__ import annotations

from typing_extensions import override

from kvcache_core.storage import TorchStorage
from transfer.transport import PageMemory


class StoragePages(PageMemory):
    """Views of the pools, never copies: numpy arrays on the host, tensors on a device."""

    def __init__(self, storage: TorchStorage) -> None:
        self._on_host = storage.device.type == "cpu"
        self._storage = storage

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        slots = self._storage.pool_bytes(pool_group, pool)
        run = slots[first_slot : first_slot + num_slots].view(-1)
        return run.numpy() if self._on_host else run
