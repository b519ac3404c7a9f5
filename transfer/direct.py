"""Whether sessions can move pages between two ranks: attention pages, equal parallel shapes.

Stricter than ``check_peer``, which tells what plans of all ranks together can map: a request has
one rank a side, and pages that lie differently take two memories that can stage. Run on both ends
before any address is used. ``check_direct(a, b)`` and ``check_direct(b, a)`` give the same rows
with the values exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from transfer.compatibility import check_peer, held_buffers, keys_text
from transfer.incompatibility import Facts, Incompatibility, fact_rows, value_text
from transfer.plan import TransferPlan
from transfer.rank_info import PageBuffer, PageGroup, PageView, RankInfo

SAME_DRAFT: Final = "configure the same drafter and the same PAGEFERRY_SHARED_DRAFT_KV on both"
SAME_SHAPE: Final = "pages are mapped between equal parallel shapes only; start both alike"
SAME_LAYOUT: Final = "pages differ in geometry; start both with one model and configuration"
STAGE: Final = "pages that lie differently are gathered and scattered, which takes both memories"

OWNERS: Final = ("target", "draft")

FACTS: Final[Facts] = {
    "num_draft_layers": (lambda info: info.num_draft_layers, SAME_DRAFT),
    "draft_kv_dtype": (lambda info: info.draft_kv_dtype, SAME_DRAFT),
    "attention_tp_size": (lambda info: info.shape.attention_tp_size, SAME_SHAPE),
    "attention_tp_rank": (lambda info: info.shape.attention_tp_rank, SAME_SHAPE),
    "pp_size": (lambda info: info.shape.pp_size, SAME_SHAPE),
    "pp_rank": (lambda info: info.shape.pp_rank, SAME_SHAPE),
    "layers_per_stage": (lambda info: info.layers_per_stage, SAME_SHAPE),
    "cp_size": (lambda info: info.shape.cp_size, SAME_SHAPE),
    "cp_rank": (lambda info: info.shape.cp_rank, SAME_SHAPE),
}
"""Facts that must be equal beside those of ``check_peer``."""

PageFacts = Mapping[str, Callable[[PageView, PageGroup, PageBuffer], object]]
"""By name: how to read a fact of the pages of a buffer that both ranks hold, and of its group."""

SHARD_FACTS: Final[PageFacts] = {
    "mapping": lambda view, _group, _buffer: view.mapping,
    "element": lambda view, _group, _buffer: view.element,
    "total_heads": lambda view, _group, _buffer: view.total_heads,
    "num_heads": lambda view, _group, _buffer: view.num_heads,
    "first_head": lambda view, _group, _buffer: view.first_head,
    "elements_per_head": lambda view, _group, _buffer: view.elements_per_head,
}
"""What makes the pages of one rank those of one other rank, wherever they lie."""

LAYOUT_FACTS: Final[PageFacts] = {
    "tokens_per_page": lambda view, _group, _buffer: view.tokens_per_page,
    "pages_per_block": lambda view, _group, _buffer: view.pages_per_block,
    "page_bytes": lambda view, _group, _buffer: view.page_bytes,
    "page_stride_bytes": lambda view, _group, _buffer: view.page_stride_bytes,
    "size_bytes": lambda _view, _group, buffer: buffer.size_bytes,
    "sections": lambda view, _group, _buffer: view.sections,
    "kind": lambda _view, group, _buffer: group.kind,
    "window": lambda _view, group, _buffer: group.window,
    "sink_blocks": lambda _view, group, _buffer: group.sink_blocks,
}
"""What lets whole slots move, so that nothing has to be staged."""


def check_direct(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why sessions cannot move pages between these two ranks; empty when they can."""
    rows = {row.field: row for row in check_peer(local, remote)}
    for row in (
        *_shape_rows(local, remote),
        *_buffer_rows(local, remote),
        *_page_rows(SHARD_FACTS, local, remote),
        *_kind_rows(local, remote),
    ):
        rows.setdefault(row.field, row)
    if not (local.can_stage and remote.can_stage):
        for row in _layout_rows(local, remote):
            rows.setdefault(row.field, row)
        # Slots are compared last: only a pair that differs in nothing else has a plan.
        return tuple(rows.values()) or tuple(_slot_rows(local, remote))
    return tuple(rows.values())


def _shape_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    yield from fact_rows(FACTS, local, remote)
    if local.shape.cp_size > 1 and remote.shape.cp_size > 1:
        yield Incompatibility(
            "context parallelism",
            str(local.shape.cp_size),
            str(remote.shape.cp_size),
            "pages of context parallel ranks are not mapped; use cp 1",
        )


def _buffer_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    ours, theirs = held_buffers(local), held_buffers(remote)
    for owner in OWNERS:
        own = {key for key in ours if key[0] == owner}
        their = {key for key in theirs if key[0] == owner}
        if own != their:
            yield Incompatibility(
                f"{owner} buffers",
                keys_text(own - their),
                keys_text(their - own),
                "each lists what the other lacks; " + SAME_LAYOUT,
            )


def _page_rows(facts: PageFacts, local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    ours, theirs = held_buffers(local), held_buffers(remote)
    for owner in OWNERS:
        common = [key for key in ours if key[0] == owner and key in theirs]
        for name, read in facts.items():
            pairs = {
                (value_text(read(*ours[key])), value_text(read(*theirs[key])))
                for key in common
                if read(*ours[key]) != read(*theirs[key])
            }
            if pairs:
                yield Incompatibility(
                    f"{owner} {name}",
                    " / ".join(sorted({pair[0] for pair in pairs})),
                    " / ".join(sorted({pair[1] for pair in pairs})),
                    SAME_LAYOUT,
                )


def _kind_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    kinds = [{group.kind for group in info.page_table.groups} for info in (local, remote)]
    if set.union(*kinds) - {"attention"}:
        yield Incompatibility(
            "page kind",
            "+".join(sorted(kinds[0])),
            "+".join(sorted(kinds[1])),
            "only attention pages are mapped; serve this model aggregated",
        )


def _layout_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    """Where pages lie differently, and whose memory cannot stage them."""
    rows = list(_page_rows(LAYOUT_FACTS, local, remote))
    yield from rows
    if rows:
        yield Incompatibility("staging", _staging_text(local), _staging_text(remote), STAGE)


def _slot_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    plan = TransferPlan.between(local, remote)
    if not all(group.direct for group in plan.groups):
        yield Incompatibility("slot layout", _layout_text(local), _layout_text(remote), SAME_LAYOUT)
        yield Incompatibility("staging", _staging_text(local), _staging_text(remote), STAGE)


def _staging_text(info: RankInfo) -> str:
    return "possible" if info.can_stage else "impossible with this memory"


def _layout_text(info: RankInfo) -> str:
    return "; ".join(
        f"{view.owner} group {view.layer_group} pool {view.pool}: "
        + ", ".join(
            f"layer {buffer.layer_id} {buffer.role} at {buffer.offset_bytes}+{buffer.size_bytes}"
            for buffer in view.buffers
        )
        + f" of {info.page_table.group(view.layer_group).slot_bytes}"
        for view in info.page_table.views
    )
