"""Pools of the storage as the transfer sees them: regions share memory, staging lays out anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.devices import DEVICES, usable
from tests.support.transfers import draft_layer, rank_info, target_layer
from transfer.copy_plan import CopyPlan
from transfer.passes import PassOver
from transfer.plan import TransferPlan
from worker.page_memory import DEVICE_COSTS, StoragePages

SLOTS = 8
LAYERS = (0, 1, 2)


def paged(tokens_per_page: int) -> LayoutPlan:
    """Two target layers and a draft layer, read in pages of this size."""
    specs = [target_layer(0, 2), target_layer(1, 2), draft_layer(2, 2)]
    return LayoutPlan.derive(
        [replace(spec, tokens_per_page=tokens_per_page) for spec in specs], tokens_per_block=8
    )


def by_token(storage: TorchStorage, layer_id: int) -> torch.Tensor:
    """Keys and values ``[slots, 2, heads, tokens of a block, head_dim]``, whatever the pages."""
    values = storage.kv(layer_id)
    if values.dim() == 5:
        return values
    return values.transpose(2, 3).flatten(3, 4)


async def finished(start: Callable[[PassOver], None]) -> None:
    """Start a pass and wait for its end."""
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    start(over.set_result)
    assert await over == ""


@pytest.mark.parametrize("device", DEVICES)
async def test_staged_pages_hold_the_same_tokens_in_pages_of_another_size(device: str) -> None:
    usable(device)
    plans = paged(4), paged(8)
    source, target = (TorchStorage(plan, [SLOTS] * len(plan.pool_groups), device) for plan in plans)
    random = torch.Generator().manual_seed(1)
    for layer in LAYERS:
        values = source.kv(layer)
        values.copy_(torch.randn(values.shape, generator=random).to(values.dtype))
    if device == "cuda":
        torch.cuda.synchronize()
    infos = [
        rank_info(plan, layers_per_stage=(2,)).model_copy(update={"can_stage": True})
        for plan in plans
    ]
    here, there = StoragePages(source).staging, StoragePages(target).staging
    slots, others = np.array([6, 1, 3], dtype=np.int32), np.array([0, 7, 2], dtype=np.int32)
    groups = TransferPlan.between(infos[0], infos[1]).groups
    assert groups
    for group in groups:
        assert not group.direct
        copies = CopyPlan.of(group)
        message = here.message(len(slots) * group.block_bytes)
        sender, receiver = group.sender.pool_group, group.receiver.pool_group
        await finished(partial(here.gather, copies, sender, slots, message))
        await finished(partial(there.scatter, copies, message, receiver, others))
    for layer in LAYERS:
        sent = by_token(source, layer)[slots.tolist()]
        got = by_token(target, layer)[others.tolist()]
        assert sent.abs().sum() > 0
        assert torch.equal(sent, got)


def test_a_region_shares_the_memory_of_its_slots() -> None:
    plan = paged(8)
    storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups), "cpu")
    region = StoragePages(storage).region(0, 0, 3, 2)
    assert isinstance(region, np.ndarray)
    region[:] = 7
    pool = storage.pool_bytes(0, 0)
    assert (pool[3:5] == 7).all()
    assert region.size == 2 * pool.shape[1]


@pytest.mark.gpu
def test_pools_that_another_process_cannot_map_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable("cuda")
    plan = paged(8)
    storage = TorchStorage(plan, [SLOTS] * len(plan.pool_groups), "cuda")
    assert StoragePages(storage).costs is DEVICE_COSTS
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    expandable = [{**segment, "is_expandable": True} for segment in segments]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: expandable)
    with pytest.raises(ValueError, match="expandable_segments"):
        StoragePages(storage)
