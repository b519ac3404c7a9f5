"""Whether two ranks can exchange pages: every reason why not, with both values.

Run on both ends before any address is used. A pair is refused for facts that change what a page
means, and for geometry that sessions cannot move; nothing is refused for being merely different.
``check_peer(a, b)`` and ``check_peer(b, a)`` give the same rows with the values exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from transfer.plan import TransferPlan
from transfer.rank_info import PageBuffer, PageGroup, PageView, RankInfo

ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One fact on which two ranks disagree."""

    field: str
    local: str
    remote: str
    advice: str

    @override
    def __str__(self) -> str:
        return f"{self.field}: ours is {self.local}, the peer's is {self.remote}; {self.advice}"


class PeerIncompatible(ConnectionError):
    """The pair cannot exchange pages. ``rows`` are all reasons."""

    def __init__(self, peer: str, rows: tuple[Incompatibility, ...]) -> None:
        self.rows = rows
        reasons = "\n  ".join(str(row) for row in rows)
        super().__init__(f"cannot exchange pages with {peer}:\n  {reasons}")


SAME_RELEASE: Final = "run one release on both"
SAME_BLOCKS: Final = "give the whole cluster one tokens_per_block"
SAME_MODEL: Final = "serve one revision of one model on both"
SAME_DTYPE: Final = "give both the same KV cache dtype"
SAME_DRAFT: Final = "configure the same drafter and the same PAGEFERRY_SHARED_DRAFT_KV on both"
SAME_SHAPE: Final = "pages are mapped between equal parallel shapes only; start both alike"
SAME_LAYOUT: Final = "pages differ in geometry; start both with one model and configuration"

FACTS: Final[Mapping[str, tuple[Callable[[RankInfo], object], str]]] = {
    "protocol": (lambda info: info.protocol, SAME_RELEASE),
    "tokens_per_block": (lambda info: info.tokens_per_block, SAME_BLOCKS),
    "model": (lambda info: info.engine.model, SAME_MODEL),
    "model_hash": (lambda info: info.engine.model_hash, SAME_MODEL),
    "num_layers": (lambda info: sum(info.layers_per_stage), SAME_MODEL),
    "rope": (lambda info: ", ".join("=".join(pair) for pair in info.engine.rope), SAME_MODEL),
    "attention": (lambda info: info.engine.attention, SAME_MODEL),
    "kv_dtype": (lambda info: info.engine.kv_dtype, SAME_DTYPE),
    "kv_scales": (lambda info: info.engine.kv_scales, SAME_DTYPE),
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
"""Facts of a rank that must be equal: how to read each, and what to do about it."""

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

BufferKey = tuple[str, int, str]
"""Owner, layer id, role."""


def check_peer(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why these two ranks cannot exchange pages; empty when they can."""
    rows = list(_fact_rows(local, remote))
    rows.extend(_page_rows(local, remote))
    if not rows:
        rows.extend(_layout_rows(local, remote))
    return tuple(rows)


def require_peer(local: RankInfo, remote: RankInfo) -> None:
    """Raise PeerIncompatible unless the pair can exchange pages."""
    rows = check_peer(local, remote)
    if rows:
        raise PeerIncompatible(str(remote.incarnation), rows)


def _fact_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    for name, (read, advice) in FACTS.items():
        ours, theirs = read(local), read(remote)
        if ours != theirs:
            yield Incompatibility(name, _text(ours), _text(theirs), advice)
    if local.shape.cp_size > 1 and remote.shape.cp_size > 1:
        yield Incompatibility(
            "context parallelism",
            _text(local.shape.cp_size),
            _text(remote.shape.cp_size),
            "pages of context parallel ranks are not mapped; use cp 1",
        )


def _page_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    ours, theirs = _buffers(local), _buffers(remote)
    for owner in ("target", "draft"):
        own = {key for key in ours if key[0] == owner}
        their = {key for key in theirs if key[0] == owner}
        if own != their:
            yield Incompatibility(
                f"{owner} buffers",
                _keys_text(own - their),
                _keys_text(their - own),
                "each lists what the other lacks; " + SAME_LAYOUT,
            )
        for name, read in PAGE_FACTS.items():
            pairs = {
                (_text(read(*ours[key])), _text(read(*theirs[key])))
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


def _buffers(info: RankInfo) -> dict[BufferKey, tuple[PageView, PageGroup, PageBuffer]]:
    return {
        (view.owner, buffer.layer_id, buffer.role): (
            view,
            info.page_table.group(view.layer_group),
            buffer,
        )
        for view in info.page_table.views
        for buffer in view.buffers
    }


def _text(value: object) -> str:
    match value:
        case None:
            return ABSENT
        case tuple():
            return "[" + ", ".join(str(entry) for entry in value) + "]"
        case _:
            return str(value)


def _keys_text(keys: set[BufferKey]) -> str:
    if not keys:
        return "nothing more"
    roles = sorted({role for _, _, role in keys})
    layers = sorted({layer for _, layer, _ in keys})
    return f"{'+'.join(roles)} of layers {_text(tuple(layers))}"


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
