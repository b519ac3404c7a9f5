"""The table of pool pointers that kernels take, as numpy int64. Device free: addresses go in.

Two shapes are accepted, one is used:

    [pools, 2]            one row a pool, in order of (pool group, pool): base address, slot bytes
    [layers, pools, 2]    one row a layer and pool of its pool group: address of the layer's first
                          buffer in slot 0, slot bytes; rows of zeros where it has no such pool

The second tells layers of mixed dtype, kv_factor or head size apart, draft layers included, and is
what :func:`per_layer_pointers` makes of either. ``row[0] + slot * row[1]`` is the address in a
slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_core.layout import LayoutPlan


def pool_pointers(plan: LayoutPlan, bases: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """The ``[pools, 2]`` table. ``bases`` has the address of every pool of every pool group.

    Raises ValueError when their number is not the plan's.
    """
    expected = [len(group.slot_bytes) for group in plan.pool_groups]
    given = [len(pools) for pools in bases]
    if given != expected:
        raise ValueError(
            f"expected base addresses of {expected} pools in the pool groups, got {given}"
        )
    rows = [
        (base, slot_bytes)
        for pools, group in zip(bases, plan.pool_groups, strict=True)
        for base, slot_bytes in zip(pools, group.slot_bytes, strict=True)
    ]
    return np.array(rows, dtype=np.int64)


def per_layer_pointers(plan: LayoutPlan, table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ``[layers, pools, 2]`` table of either shape; layers are in the order of the plan's ids.

    A table that has this shape already comes back as it is. Raises ValueError for another shape or
    element type.
    """
    pools = sum(len(group.slot_bytes) for group in plan.pool_groups)
    widest = max(len(group.slot_bytes) for group in plan.pool_groups)
    per_layer = (len(plan.specs), widest, 2)
    if table.dtype != np.int64 or table.shape not in ((pools, 2), per_layer):
        raise ValueError(
            f"expected int64 pointers [{pools}, 2] or {list(per_layer)}, "
            f"got {table.dtype} {list(table.shape)}"
        )
    if table.ndim == 3:
        return table
    first_pool = np.cumsum([0, *(len(group.slot_bytes) for group in plan.pool_groups)])
    result = np.zeros(per_layer, dtype=np.int64)
    rows = {layer_id: row for row, layer_id in enumerate(plan.layer_ids)}
    addresses = sorted(plan.addresses.values(), key=lambda entry: -entry.offset_bytes)
    for address in addresses:
        base, slot_bytes = table[first_pool[address.pool_group] + address.pool]
        entry = (base + address.offset_bytes, slot_bytes)
        result[rows[address.layer_id], address.pool] = entry
    return result
