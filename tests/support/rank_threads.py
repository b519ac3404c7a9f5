"""Several ranks of an instance as threads of the test, which add up over gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import distributed

from worker.model.dp_ranks import DpRanks
from worker.model.rank_sum import GroupSum, RankSum
from worker.model.shard import Shard

ResultT = TypeVar("ResultT")
GroupT = TypeVar("GroupT", bound=GroupSum)
TIMEOUT_S = 60.0


def on_ranks(size: int, work: Callable[[RankSum], ResultT]) -> list[ResultT]:
    """Do the same on every rank at once; the results in order of ranks."""
    return _on_ranks(size, GroupSum, work)


def on_dp_ranks(size: int, work: Callable[[DpRanks], ResultT]) -> list[ResultT]:
    """The same where each rank is a dp group."""
    return _on_ranks(size, DpRanks, work)


def _on_ranks(size: int, kind: type[GroupT], work: Callable[[GroupT], ResultT]) -> list[ResultT]:
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]

    def one(rank: int) -> ResultT:
        shard, cpu = Shard(rank, size), torch.device("cpu")
        return work(kind.join(store, shard, cpu, "127.0.0.1", TIMEOUT_S))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
