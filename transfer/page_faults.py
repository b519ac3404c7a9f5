"""Where the facts of one rank contradict each other, so that no page of it could be found.

Copies go where a peer's page table says: one that is wrong is refused before any address is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from kvcache_core.life_cycle import LifeCycleKind
from transfer.page_runs import rows_per_head
from transfer.rank_info import PageGroup, PageView, ParallelShape, RankInfo
from transfer.sharding import num_shards, shard_index

MAPPINGS = ("head_major", "replicated", "sectioned")


def page_faults(info: RankInfo) -> tuple[str, ...]:
    """Every contradiction in the page table of a rank, one sentence each."""
    return tuple(dict.fromkeys(_faults(info)))


def _faults(info: RankInfo) -> Iterator[str]:
    for group in info.page_table.groups:
        if group.kind not in [kind.value for kind in LifeCycleKind]:
            yield f"layer group {group.layer_group} is of unknown kind {group.kind}"
        if group.window is not None and group.window < 1:
            yield f"layer group {group.layer_group} has a window of {group.window} tokens"
    for view in info.page_table.views:
        group = info.page_table.group(view.layer_group)
        place = f"{view.owner} view of layer group {view.layer_group} pool {view.pool}"
        for fault in (
            *_page_faults(view, group, info.tokens_per_block),
            *_slot_faults(view, group),
            *_shard_faults(view, info.shape),
        ):
            yield f"{place}: {fault}"
    yield from _layer_faults(info)
    yield from _overlaps(info)


def _page_faults(view: PageView, group: PageGroup, tokens_per_block: int) -> Iterator[str]:
    tokens = 0 if group.kind == "state" else tokens_per_block
    if view.tokens_per_page * view.pages_per_block != tokens or (
        group.kind == "state" and view.pages_per_block != 1
    ):
        yield (
            f"{view.pages_per_block} pages of {view.tokens_per_page} tokens hold no block of "
            f"{tokens}"
        )
    if view.page_bytes % (view.num_heads * rows_per_head(view)):
        yield (
            f"{view.page_bytes} bytes are no {rows_per_head(view)} rows of {view.num_heads} heads"
        )
    elements = view.num_heads * rows_per_head(view) * view.elements_per_head
    if view.page_bytes * 8 % elements:
        yield f"{view.page_bytes} bytes do not hold {elements} elements"
    if view.page_stride_bytes < view.page_bytes:
        yield f"pages of {view.page_bytes} bytes are {view.page_stride_bytes} bytes apart"
    if view.mapping not in MAPPINGS:
        yield f"unknown mapping {view.mapping}"
    width = view.num_heads * view.elements_per_head
    sections = width if view.mapping == "sectioned" else 0
    if sum(view.sections) != sections or min(view.sections, default=1) < 1:
        yield f"sections {list(view.sections)} do not add up to {sections} elements"
    if view.mapping == "sectioned" and view.tokens_per_page:
        yield f"sectioned pages hold a state, not {view.tokens_per_page} tokens"


def _slot_faults(view: PageView, group: PageGroup) -> Iterator[str]:
    slot = group.slot_bytes[view.pool]
    size = view.page_stride_bytes * view.pages_per_block
    for buffer in view.buffers:
        if buffer.size_bytes != size or buffer.offset_bytes + size > slot:
            yield (
                f"{buffer.size_bytes} bytes at {buffer.offset_bytes} are no {size} bytes within "
                f"a slot of {slot}"
            )


def _shard_faults(view: PageView, shape: ParallelShape) -> Iterator[str]:
    ranks, rank = shape.attention_tp_size, shape.attention_tp_rank
    if view.mapping == "replicated" and (view.num_heads, view.first_head) != (view.total_heads, 0):
        yield f"replicated, yet heads {view.first_head}+{view.num_heads} of {view.total_heads}"
    elif view.total_heads % view.num_heads or ranks % num_shards(view):
        yield f"{view.total_heads} heads do not spread over {ranks} ranks by {view.num_heads}"
    elif view.mapping != "replicated" and (
        view.first_head % view.num_heads or shard_index(view) != rank // (ranks // num_shards(view))
    ):
        yield (
            f"rank {rank} of {ranks} does not hold heads {view.first_head}+{view.num_heads} of "
            f"{view.total_heads}"
        )


def _layer_faults(info: RankInfo) -> Iterator[str]:
    start, end = stage(info)
    seen: set[tuple[int, str]] = set()
    for view in info.page_table.views:
        for buffer in view.buffers:
            layer = buffer.layer_id
            if view.owner == "target" and not start <= layer < end:
                yield f"target layer {layer} is not in the rank's stage [{start}, {end})"
            if view.owner == "draft" and layer < sum(info.layers_per_stage):
                yield f"draft layer {layer} has the number of a target layer"
            if (layer, buffer.role) in seen:
                yield f"layer {layer} has two {buffer.role} buffers"
            seen.add((layer, buffer.role))
    drafts = info.page_table.draft_layers
    if len(drafts) > (info.num_draft_layers or 0):
        yield f"draft layers {list(drafts)} of {info.num_draft_layers or 0}"


def _overlaps(info: RankInfo) -> Iterator[str]:
    slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for view in info.page_table.views:
        slots.setdefault((view.layer_group, view.pool), []).extend(
            (buffer.offset_bytes, buffer.size_bytes) for buffer in view.buffers
        )
    for (group, pool), buffers in slots.items():
        for (offset, size), (behind, _) in pairwise(sorted(buffers)):
            if offset + size > behind:
                yield (f"layer group {group} pool {pool}: buffers at {offset} and {behind} overlap")


def stage(info: RankInfo) -> tuple[int, int]:
    """Target layers ``[start, end)`` of the rank's pipeline stage."""
    ends = (0, *accumulate(info.layers_per_stage))
    return ends[info.shape.pp_rank], ends[info.shape.pp_rank + 1]
