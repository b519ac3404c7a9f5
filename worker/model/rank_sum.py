"""Sums over the ranks of an instance: the only thing that ranks say to each other in a forward.

All ranks make the same calls in the same order. On a device the sum is queued on the current
stream, so that it can be captured with the kernels around it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.nn import Module
from typing_extensions import override

from worker.model.products import Product
from worker.model.shard import Shard


class RankSum(Protocol):
    """The ranks that share a model's layers, seen from one of them."""

    @property
    def shard(self) -> Shard:
        """Which of them this is."""

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``partial``, contiguous and of equal shape and dtype, which is
        overwritten and returned. Equal on all ranks to the last bit.
        """


class OnlyRank(RankSum):
    """One rank has all of the model."""

    @property
    @override
    def shard(self) -> Shard:
        return Shard()

    @override
    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


class GroupSum(RankSum):
    """Ranks in a group of torch that has no global state: an instance is not all of its process."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._shard = Shard(group.rank(), group.size())

    @classmethod
    def join(
        cls, store: Store, shard: Shard, device: torch.device, host: str, timeout_s: float
    ) -> GroupSum:
        """Meet the other ranks: over gloo on a CPU, where it listens on ``host`` alone, over NCCL
        on CUDA devices. No sum waits longer than ``timeout_s`` for another rank. Once this
        returns no rank needs the store any more.
        """
        timeout = timedelta(seconds=timeout_s)
        group: Any
        if device.type == "cuda":
            on_device = distributed.ProcessGroupNCCL.Options()
            on_device._timeout = timeout
            group = distributed.ProcessGroupNCCL(store, shard.rank, shard.size, on_device)
        else:
            options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
            group = distributed.ProcessGroupGloo(store, shard.rank, shard.size, options)
        joined = cls(group)
        joined.add_up(torch.ones(1, device=device)).item()
        return joined

    @property
    @override
    def shard(self) -> Shard:
        return self._shard

    @override
    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([partial]).wait()
        return partial


class SummedProduct(Product):
    """A row-parallel product: this rank's part of it, added up over all ranks."""

    def __init__(self, part: Product, ranks: RankSum) -> None:
        self._part = part
        self._ranks = ranks

    @override
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._ranks.add_up(self._part(rows))

    @override
    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)


def summed(part: Product, ranks: RankSum) -> Product:
    """The whole of a row-parallel product. An only rank has it already."""
    return part if ranks.shard.size == 1 else SummedProduct(part, ranks)


class SummedModule(Module):
    """The same for a module of transformers: a linear one, or all experts of a layer."""

    def __init__(self, part: Any, ranks: RankSum) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    @override
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._ranks.add_up(self.part(*inputs))
