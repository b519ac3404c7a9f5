"""The transferable part of a layout plan in the words of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcache_core.address import BufferAddress
from kvcache_core.groups import View
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole, KVCacheLayerOwner, PageMapping
from transfer.rank_info import Owner, PageBuffer, PageGroup, PageTable, PageView, ParallelShape

OWNERS: Mapping[KVCacheLayerOwner, Owner] = {
    KVCacheLayerOwner.TARGET: "target",
    KVCacheLayerOwner.DRAFT: "draft",
}


TotalHeads = Mapping[tuple[int, BufferRole], int]
"""Heads of a buffer over all ranks of an attention tp group, by layer id and role."""


def page_table_of(
    plan: LayoutPlan, shape: ParallelShape, total_heads: TotalHeads | None = None
) -> PageTable:
    """Page table of ``plan`` without its PRIVATE layers.

    ``total_heads`` tells what a rank's plan does not: which heads other ranks hold as well. Without
    an entry each head of a head-major buffer, and each section of a sectioned one, lives on one
    rank. Raises ValueError for heads that do not spread evenly.
    """
    groups = set(plan.transferable_groups())
    return PageTable(
        groups=tuple(
            PageGroup(
                layer_group=group.id,
                kind=group.life_cycle.kind.value,
                window=group.life_cycle.window,
                sink_blocks=group.life_cycle.sink_blocks,
                pool_group=group.pool_group,
                slot_bytes=group.slot_bytes,
            )
            for group in plan.layer_groups
            if group.id in groups
        ),
        views=tuple(
            page_view
            for view in plan.views
            if view.transferable
            for page_view in _page_views(view, shape, total_heads or {})
        ),
    )


def append_drafts(target: PageTable, drafts: PageTable, shift: DraftShift) -> PageTable:
    """One table of a rank whose drafter has a layout plan and pools of its own.

    ``drafts`` is the drafter's table, shifted behind the target's numbers.
    """
    return PageTable(
        groups=target.groups
        + tuple(
            group.model_copy(
                update={
                    "layer_group": group.layer_group + shift.layer_groups,
                    "pool_group": group.pool_group + shift.pool_groups,
                }
            )
            for group in drafts.groups
        ),
        views=target.views
        + tuple(
            view.model_copy(update={"layer_group": view.layer_group + shift.layer_groups})
            for view in drafts.views
        ),
    )


@dataclass(frozen=True, slots=True)
class DraftShift:
    """What is added to the drafter's own numbers: the counts of the target's plan."""

    layer_groups: int
    pool_groups: int

    @classmethod
    def behind(cls, plan: LayoutPlan) -> DraftShift:
        """Behind all groups of ``plan``, private ones too."""
        return cls(len(plan.layer_groups), len(plan.pool_groups))


def draft_facts(plan: LayoutPlan) -> tuple[int, str] | None:
    """Number of shared draft layers and their element types, or None without any.

    A ``RankInfo`` tells them of the whole instance: of the plan of a rank that holds all of them.
    """
    groups = set(plan.transferable_groups())
    drafts = [
        spec
        for spec in plan.specs
        if spec.owner is KVCacheLayerOwner.DRAFT and plan.layer_group_of(spec.layer_id).id in groups
    ]
    if not drafts:
        return None
    return len(drafts), "+".join(sorted({spec.dtype.value for spec in drafts}))


def _page_views(view: View, shape: ParallelShape, total_heads: TotalHeads) -> Iterator[PageView]:
    """One page view for each number of heads over all ranks: it decides who else holds a head."""
    geometry = view.geometry
    replicated = geometry.mapping is PageMapping.REPLICATED
    alone = geometry.num_heads * shape.attention_tp_size
    by_total: dict[int, list[BufferAddress]] = {}
    for buffer in view.buffers:
        total = total_heads.get((buffer.layer_id, buffer.role), alone)
        by_total.setdefault(geometry.num_heads if replicated else total, []).append(buffer)
    for total, buffers in by_total.items():
        first = 0 if replicated else first_head(shape, geometry.num_heads, total)
        yield _page_view(view, buffers, first, total)


def _page_view(view: View, buffers: Sequence[BufferAddress], first: int, total: int) -> PageView:
    geometry = view.geometry
    return PageView(
        owner=OWNERS[view.owner],
        layer_group=view.layer_group,
        pool=view.pool,
        mapping=geometry.mapping.value,
        element=geometry.dtype.value,
        num_heads=geometry.num_heads,
        first_head=first,
        total_heads=total,
        elements_per_head=geometry.elements_per_head,
        tokens_per_page=geometry.tokens_per_page,
        pages_per_block=geometry.pages_per_block,
        page_bytes=geometry.page_bytes,
        page_stride_bytes=geometry.page_stride_bytes,
        sections=geometry.sections,
        buffers=tuple(
            PageBuffer(
                layer_id=buffer.layer_id,
                role=buffer.role.value,
                offset_bytes=buffer.offset_bytes,
                size_bytes=buffer.bytes,
            )
            for buffer in buffers
        ),
    )


def first_head(shape: ParallelShape, num_heads: int, total_heads: int) -> int:
    """First of the ``num_heads`` heads of a rank; fewer heads than ranks are replicated in order.

    Raises ValueError when the numbers do not spread evenly.
    """
    ranks, rank = shape.attention_tp_size, shape.attention_tp_rank
    if num_heads * ranks == total_heads:
        return rank * num_heads
    if num_heads == 1 and ranks % total_heads == 0:
        return rank // (ranks // total_heads)
    raise ValueError(
        f"{total_heads} kv heads do not spread over {ranks} ranks with {num_heads} heads each; "
        "choose a tensor parallel size that divides the heads or is a multiple of them"
    )
