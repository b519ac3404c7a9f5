"""The transferable part of a layout plan in the words of the wire."""

from __future__ import annotations

from collections.abc import Mapping

from kvcache_core.groups import View
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import KVCacheLayerOwner, PageMapping
from transfer.rank_info import Owner, PageBuffer, PageGroup, PageTable, PageView, ParallelShape

OWNERS: Mapping[KVCacheLayerOwner, Owner] = {
    KVCacheLayerOwner.TARGET: "target",
    KVCacheLayerOwner.DRAFT: "draft",
}


def page_table_of(
    plan: LayoutPlan, shape: ParallelShape, total_heads: Mapping[int, int] | None = None
) -> PageTable:
    """Page table of ``plan`` without its PRIVATE layers.

    ``total_heads`` gives the kv heads of a layer over all ranks, which a rank's plan does not tell
    when heads are replicated; without it each head lives on one rank. Raises ValueError for heads
    that do not spread evenly.
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
            _page_view(view, shape, total_heads or {}) for view in plan.views if view.transferable
        ),
    )


def draft_facts(plan: LayoutPlan) -> tuple[int, str] | None:
    """Number of shared draft layers and their element types, or None without any."""
    groups = set(plan.transferable_groups())
    drafts = [
        spec
        for spec in plan.specs
        if spec.owner is KVCacheLayerOwner.DRAFT and plan.layer_group_of(spec.layer_id).id in groups
    ]
    if not drafts:
        return None
    return len(drafts), "+".join(sorted({spec.dtype.value for spec in drafts}))


def _page_view(view: View, shape: ParallelShape, total_heads: Mapping[int, int]) -> PageView:
    geometry = view.geometry
    replicated = geometry.mapping is PageMapping.REPLICATED
    total = geometry.num_heads * (1 if replicated else shape.attention_tp_size)
    totals = {total_heads.get(buffer.layer_id, total) for buffer in view.buffers}
    if len(totals) > 1:
        raise ValueError(
            f"layers of one view have {sorted(totals)} kv heads in all; "
            "layers of one geometry must have one number of heads"
        )
    (total,) = totals
    return PageView(
        owner=OWNERS[view.owner],
        layer_group=view.layer_group,
        pool=view.pool,
        mapping=geometry.mapping.value,
        element=geometry.dtype.value,
        num_heads=geometry.num_heads,
        first_head=0 if replicated else first_head(shape, geometry.num_heads, total),
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
            for buffer in view.buffers
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
