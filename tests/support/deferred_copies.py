"""A device that is far behind: copies and kernels that run when they are told to, in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from kvcache_core.storage.upload import CopyQueue, PendingCopy


class Ticket(PendingCopy):
    done = False

    @override
    def is_complete(self) -> bool:
        return self.done


class DeferredCopies(CopyQueue):
    """A stream that runs nothing before ``sync``, like a device that is far behind."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], object], Ticket]] = []

    @override
    def snapshot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @override
    def accepts(self, source: torch.Tensor) -> bool:
        return True

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        ticket = Ticket()
        self.work.append((lambda: target.copy_(source), ticket))
        return ticket

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel behind the copies."""
        self.work.append((kernel, Ticket()))

    def sync(self) -> None:
        for work, ticket in self.work:
            work()
            ticket.done = True
        self.work.clear()
