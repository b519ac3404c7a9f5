"""Pools of torch tensors behind the rig's arrays: on the CPU the same memory, on a GPU a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from tests.transfer.agent_rig import GROUPS, ArrayMemory
from transfer.copy_plan import CopyPlan, Slots
from transfer.page_staging import PageStaging
from transfer.passes import PassOver
from worker.device_copies import DeviceCopies, IndexedUnits
from worker.device_staging import DeviceStaging, PassDevice


class ArrayDeviceStaging(DeviceStaging):
    """Staging as on a device, on the CPU, with messages that every transport takes: arrays."""

    @override
    def message(self, size_bytes: int) -> Any:
        return super().message(size_bytes).numpy()

    @override
    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: Any, over: PassOver
    ) -> None:
        super().gather(plan, pool_group, slots, torch.from_numpy(message), over)

    @override
    def scatter(
        self, plan: CopyPlan, message: Any, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        super().scatter(plan, torch.from_numpy(message), pool_group, slots, over)


class DeviceMemory(ArrayMemory):
    """The CPU as a device: passes run in a thread, and are over later."""

    def __init__(
        self,
        device: PassDevice,
        num_slots: int,
        groups: Mapping[int, tuple[int, ...]] = GROUPS,
    ) -> None:
        super().__init__(num_slots, groups)
        tensors = {key: torch.from_numpy(array) for key, array in self.pools.items()}
        copies = DeviceCopies(IndexedUnits())
        self._threaded = ArrayDeviceStaging(_by_group(tensors), copies, device)

    @property
    @override
    def staging(self) -> PageStaging:
        return self._threaded


class CudaMemory(ArrayMemory):
    """Pools on the first GPU; the arrays are brought there and back."""

    def __init__(self, num_slots: int, groups: Mapping[int, tuple[int, ...]] = GROUPS) -> None:
        super().__init__(num_slots, groups)
        self._tensors = {key: torch.from_numpy(array).cuda() for key, array in self.pools.items()}
        self._on_device = DeviceStaging.on(torch.device("cuda", 0), _by_group(self._tensors))

    @property
    @override
    def staging(self) -> PageStaging:
        return self._on_device

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        run = self._tensors[pool_group, pool][first_slot : first_slot + num_slots]
        assert len(run) == num_slots
        return run.view(-1)

    def upload(self) -> None:
        """Arrays to the GPU, for good when this returns."""
        for key, array in self.pools.items():
            self._tensors[key].copy_(torch.from_numpy(array))
        torch.cuda.current_stream().synchronize()

    def download(self) -> None:
        """What is on the GPU, by a stream that waits for no other."""
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for key, array in self.pools.items():
                array[:] = self._tensors[key].cpu().numpy()


def _by_group(tensors: Mapping[tuple[int, int], torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for (group, _), tensor in tensors.items():
        found.setdefault(group, []).append(tensor)
    return found
