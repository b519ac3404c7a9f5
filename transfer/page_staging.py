"""Passes between the pages of one memory and messages beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from typing_extensions import override

from transfer.copy_plan import CopyPlan, Slots
from transfer.host_copies import Bytes, HostCopies


class PageStaging(Protocol):
    """Gathers and scatters pages of one kind of memory. A *message* is its own kind of memory,
    one-dimensional, of bytes, and can be sliced.

    Both passes are over when the call returns. They raise ValueError for slots and sizes that do
    not fit, before a byte is written.
    """

    def message(self, size_bytes: int) -> Any:
        """New memory beside the pages; what is in it is undefined."""

    def gather(self, plan: CopyPlan, pool_group: int, slots: Slots, message: Any) -> None:
        """Copy the sender's runs of ``slots`` into all of ``message``."""

    def scatter(self, plan: CopyPlan, message: Any, pool_group: int, slots: Slots) -> None:
        """Copy all of ``message`` into the receiver's runs of ``slots``."""


class HostStaging(PageStaging):
    """Pools in host memory."""

    def __init__(self, pools: Mapping[int, Sequence[Bytes]]) -> None:
        """``pools`` by pool group, each uint8 ``[slots, slot bytes]``, contiguous."""
        self._pools: Final = pools
        self._copies: Final = HostCopies()

    @override
    def message(self, size_bytes: int) -> Bytes:
        return np.empty(size_bytes, dtype=np.uint8)

    @override
    def gather(self, plan: CopyPlan, pool_group: int, slots: Slots, message: Bytes) -> None:
        self._copies.gather(plan, self._pools[pool_group], slots, message)

    @override
    def scatter(self, plan: CopyPlan, message: Bytes, pool_group: int, slots: Slots) -> None:
        self._copies.scatter(plan, message, self._pools[pool_group], slots)
