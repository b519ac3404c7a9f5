"""The pointer table that kernels get: int64 ``[num_pools, 2]``, one row a pool.

Column 0 is the pool's base address, column 1 its ``slot_bytes``; rows are ordered by pool group,
then pool, so that the pools of a group follow each other. Together with a slot and a buffer's
offset a row is all that an address needs.
"""

from __future__ import annotations

import torch

from kvcache_core.storage.torch_storage import TorchStorage

COLUMNS = 2


def pointer_table(storage: TorchStorage) -> torch.Tensor:
    """The table of one rank's pools, on the host."""
    pools = [
        storage.pool_bytes(group.id, pool)
        for group in storage.plan.pool_groups
        for pool in range(len(group.slot_bytes))
    ]
    rows = [(pool.data_ptr(), pool.shape[1]) for pool in pools]
    return torch.tensor(rows, dtype=torch.int64)


def pool_row(storage: TorchStorage, pool_group: int, pool: int) -> int:
    """Row of one pool in the table."""
    return sum(len(group.slot_bytes) for group in storage.plan.pool_groups[:pool_group]) + pool


def flat_pointer_table(table: torch.Tensor) -> torch.Tensor:
    """``[num_pools, 2]`` of a table in either layout.

    A 3-D table ``[pool_groups, most pools of a group, 2]`` has rows of zeros where a group has
    fewer pools; they are dropped. Raises ValueError for another shape or type.
    """
    if table.dtype != torch.int64 or table.ndim not in (2, 3) or table.shape[-1] != COLUMNS:
        raise ValueError(
            "expected an int64 table [pools, 2] or [pool_groups, pools, 2], "
            f"got {table.dtype} {list(table.shape)}"
        )
    if table.ndim == COLUMNS:
        return table
    rows = table.reshape(-1, COLUMNS)
    return rows[rows[:, 0] != 0]
