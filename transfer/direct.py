"""Whether sessions can move pages between two ranks: whole slots, between equal parallel shapes.

Stricter than ``check_peer``, which tells what a plan can map: sessions move direct groups only. Run
on both ends before any address is used. ``check_direct(a, b)`` and ``check_direct(b, a)`` give the
same rows with the values exchanged.
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

PAGE_FACTS: Final[Mapping[str, Callable[[PageView, PageGroup, PageBuffer], object]]] = {
    "mapping": lambda view, _group, _buffer: view.mapping,
    "element": lambda view, _group, _buffer: view.element,
    "total_heads": lambda view, _group, _buffer: view.total_heads,
    "num_heads": lambda view, _group, _buffer: view.num_heads,
    "first_head": lambda view, _group, _buffer: view.first_head,
    "elements_per_head": lambda view, _group, _buffer: view.elements_per_head,
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
"""Facts of the pages of a buffer that both ranks hold, and of the group it lives in."""


def check_direct(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why sessions cannot move pages between these two ranks; empty when they can."""
    rows = {row.field: row for row in check_peer(local, remote)}
    for row in (*_shape_rows(local, remote), *_page_rows(local, remote)):
        rows.setdefault(row.field, row)
    # Slots are compared last: only a pair that differs in nothing else has a plan.
    return tuple(rows.values()) or tuple(_layout_rows(local, remote))


def _shape_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    yield from fact_rows(FACTS, local, remote)
    if local.shape.cp_size > 1 and remote.shape.cp_size > 1:
        yield Incompatibility(
            "context parallelism",
            str(local.shape.cp_size),
            str(remote.shape.cp_size),
            "pages of context parallel ranks are not mapped; use cp 1",
        )


def _page_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    ours, theirs = held_buffers(local), held_buffers(remote)
    for owner in ("target", "draft"):
        own = {key for key in ours if key[0] == owner}
        their = {key for key in theirs if key[0] == owner}
        if own != their:
            yield Incompatibility(
                f"{owner} buffers",
                keys_text(own - their),
                keys_text(their - own),
                "each lists what the other lacks; " + SAME_LAYOUT,
            )
        for name, read in PAGE_FACTS.items():
            pairs = {
                (value_text(read(*ours[key])), value_text(read(*theirs[key])))
                for key in own & their
                if read(*ours[key]) != read(*theirs[key])
            }
            if pairs:
                yield Incompatibility(
                    f"{owner} {name}",
                    " / ".join(sorted({pair[0] for pair in pairs})),
                    " / ".join(sorted({pair[1] for pair in pairs})),
                    SAME_LAYOUT,
                )
    kinds = [{group.kind for _, group, _ in held.values()} for held in (ours, theirs)]
    if set.union(*kinds) - {"attention"}:
        yield Incompatibility(
            "page kind",
            "+".join(sorted(kinds[0])),
            "+".join(sorted(kinds[1])),
            "only attention pages are mapped; serve this model aggregated",
        )


def _layout_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    plan = TransferPlan.between(local, remote)
    covered = len(plan.groups) == len(local.page_table.groups) == len(remote.page_table.groups)
    if not covered or not all(group.direct for group in plan.groups):
        yield Incompatibility("slot layout", _layout_text(local), _layout_text(remote), SAME_LAYOUT)


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
