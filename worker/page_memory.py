"""Slots of the storage as memory that a transport can send from and receive into."""

from __future__ import annotations

from typing import Final

import torch
from typing_extensions import override

from kvcache_core.storage import TorchStorage
from transfer.costs import TransferCosts
from transfer.page_staging import HostStaging, PageStaging
from transfer.passes import PassThread
from transfer.transport import PageMemory
from worker.device_staging import DeviceStaging

DEVICE_COSTS: Final = TransferCosts(message_us=90.0, copy_bytes_per_us=1.7e6, pass_us=150.0)
"""An H200's: one more message over CUDA IPC, copies beside their start, and a pass over one block
from the call to the callback (``benchmarks.device_copies``).
"""


class StoragePages(PageMemory):
    """Views of the pools, never copies: numpy arrays on the host, tensors on a device."""

    def __init__(self, storage: TorchStorage) -> None:
        """Raises ValueError for pools in memory that CUDA cannot share with another process."""
        self._on_host = storage.device.type == "cpu"
        self._storage = storage
        if storage.device.type == "cuda":
            _check_shareable(storage)
        self._staging = _host_staging(storage) if self._on_host else _device_staging(storage)

    @property
    @override
    def staging(self) -> PageStaging:
        return self._staging

    @property
    def costs(self) -> TransferCosts:
        """What moving these pages costs."""
        return TransferCosts() if self._on_host else DEVICE_COSTS

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        slots = self._storage.pool_bytes(pool_group, pool)
        run = slots[first_slot : first_slot + num_slots].view(-1)
        return run.numpy() if self._on_host else run


def _pools(storage: TorchStorage) -> dict[int, list[torch.Tensor]]:
    return {
        number: [storage.pool_bytes(number, pool) for pool in range(len(group.slot_bytes))]
        for number, group in enumerate(storage.plan.pool_groups)
    }


def _host_staging(storage: TorchStorage) -> HostStaging:
    return HostStaging(
        {group: [pool.numpy() for pool in pools] for group, pools in _pools(storage).items()},
        PassThread(),
    )


def _device_staging(storage: TorchStorage) -> DeviceStaging:
    return DeviceStaging.on(storage.device, _pools(storage))


def _check_shareable(storage: TorchStorage) -> None:
    """CUDA IPC shares what cudaMalloc gave, and no segment that torch maps piece by piece."""
    address = storage.pool_bytes(0, 0).data_ptr()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        start = segment["address"]
        if start <= address < start + segment["total_size"] and segment["is_expandable"]:
            raise ValueError(
                "expected the KV cache in memory of cudaMalloc, which CUDA IPC can share, got an "
                "expandable segment; take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
            )
