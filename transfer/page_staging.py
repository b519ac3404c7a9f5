"""Passes between the pages of one memory and messages beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from transfer import staged_cut
from transfer.copy_plan import CopyPlan, PageCopies, Slots
from transfer.host_copies import Bytes, HostCopies
from transfer.passes import PassOver, PassRunner

MemoryT = TypeVar("MemoryT")


class PageStaging(Protocol):
    """Gathers and scatters pages of one kind of memory. A *message* is its own kind of memory,
    one-dimensional, of bytes, and can be sliced.

    Both passes are asked for in the event loop, which they do not hold up for longer than a copy of
    ``message_bytes`` takes on the host. They run in the order asked for, after whatever had been
    written when they were, and are over when ``over`` is called, which may be before the call
    returns: until then pages and message belong to the pass. They raise ValueError for slots and
    sizes that do not fit, before a byte is written; then ``over`` is not called.
    """

    @property
    def message_bytes(self) -> int:
        """Most bytes of a message of more than one block that suits this memory."""

    def message(self, size_bytes: int) -> Any:
        """New memory beside the pages; what is in it is undefined. Raises MemoryError."""

    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: Any, over: PassOver
    ) -> None:
        """Copy the sender's runs of ``slots`` into all of ``message``."""

    def scatter(
        self, plan: CopyPlan, message: Any, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        """Copy all of ``message`` into the receiver's runs of ``slots``."""


class PoolStaging(PageStaging, Generic[MemoryT]):
    """Pools of one kind of memory, given what copies there and where the passes run."""

    def __init__(
        self,
        pools: Mapping[int, Sequence[MemoryT]],
        copies: PageCopies[MemoryT],
        passes: PassRunner,
    ) -> None:
        """``pools`` by pool group, each uint8 ``[slots, slot bytes]``, contiguous."""
        self._pools: Final = pools
        self._copies: Final = copies
        self._passes: Final = passes

    @override
    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: MemoryT, over: PassOver
    ) -> None:
        pools = self._pools[pool_group]
        self._copies.check_gather(plan, pools, slots, message)
        self._passes.start(lambda: self._copies.gather(plan, pools, slots, message), over)

    @override
    def scatter(
        self, plan: CopyPlan, message: MemoryT, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        pools = self._pools[pool_group]
        self._copies.check_scatter(plan, message, pools, slots)
        self._passes.start(lambda: self._copies.scatter(plan, message, pools, slots), over)


class HostStaging(PoolStaging[Bytes]):
    """Pools in host memory."""

    def __init__(self, pools: Mapping[int, Sequence[Bytes]], passes: PassRunner) -> None:
        super().__init__(pools, HostCopies(), passes)

    @property
    @override
    def message_bytes(self) -> int:
        return staged_cut.STAGING_MESSAGE_BYTES

    @override
    def message(self, size_bytes: int) -> Bytes:
        return np.empty(size_bytes, dtype=np.uint8)
