"""Whether a plan can map the pages of two ranks: every reason why not, with both values.

Run on both ends before any address is used. A pair is refused for facts that change what a page
means and for layouts that no ``TransferPlan`` maps; nothing is refused for being merely different.
``check_peer(a, b)`` and ``check_peer(b, a)`` give the same rows with the values exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from transfer.incompatibility import Facts, Incompatibility, PeerIncompatible, fact_rows, value_text
from transfer.page_faults import page_faults, stage
from transfer.page_runs import element_bits, splits_bytes
from transfer.rank_info import PageBuffer, PageGroup, PageView, RankInfo
from transfer.sharding import num_shards, shard_index

SAME_RELEASE: Final = "run one release on both"
SAME_BLOCKS: Final = "give the whole cluster one tokens_per_block"
SAME_MODEL: Final = "serve one revision of one model on both"
SAME_DTYPE: Final = "give both the same KV cache dtype"
SAME_DRAFT: Final = "configure the same drafter on both, or none on one of them"

FACTS: Final[Facts] = {
    "protocol": (lambda info: info.protocol, SAME_RELEASE),
    "tokens_per_block": (lambda info: info.tokens_per_block, SAME_BLOCKS),
    "model": (lambda info: info.engine.model, SAME_MODEL),
    "model_hash": (lambda info: info.engine.model_hash, SAME_MODEL),
    "num_layers": (lambda info: sum(info.layers_per_stage), SAME_MODEL),
    "rope": (lambda info: ", ".join("=".join(pair) for pair in info.engine.rope), SAME_MODEL),
    "attention": (lambda info: info.engine.attention, SAME_MODEL),
    "kv_dtype": (lambda info: info.engine.kv_dtype, SAME_DTYPE),
    "kv_scales": (lambda info: info.engine.kv_scales, SAME_DTYPE),
}
"""Facts that must be equal whatever the drafters."""

DRAFT_FACTS: Final[Facts] = {
    "num_draft_layers": (lambda info: info.num_draft_layers, SAME_DRAFT),
    "draft_kv_dtype": (lambda info: info.draft_kv_dtype, SAME_DRAFT),
}
"""Facts that must be equal where both share draft layers; either side may draft alone."""

PAGE_FACTS: Final[Mapping[str, Callable[[PageView], object]]] = {
    "mapping": lambda view: view.mapping,
    "element": lambda view: view.element,
    "total_heads": lambda view: None if view.sections else view.total_heads,
    "elements_per_head": lambda view: None if view.sections else view.elements_per_head,
    "element_bits": element_bits,
    "sections": lambda view: tuple(size * num_shards(view) for size in view.sections),
}
"""Facts that the pages of a buffer have in common on all ranks that hold a part of it."""

Held = tuple[PageView, PageGroup, PageBuffer]
BufferKey = tuple[str, int, str]
"""Owner, layer id, role."""


def check_peer(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why no plan maps pages between these two ranks; empty when one does."""
    rows = list(_fact_rows(local, remote))
    rows.extend(_table_rows(local, remote))
    if not any(row.field == "page table" for row in rows):
        rows.extend(_page_rows(local, remote))
    return tuple(rows)


def require_peer(local: RankInfo, remote: RankInfo) -> None:
    """Raise PeerIncompatible unless pages of the pair can be mapped."""
    rows = check_peer(local, remote)
    if rows:
        raise PeerIncompatible(str(remote.incarnation), rows)


def _fact_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    yield from fact_rows(FACTS, local, remote)
    if local.num_draft_layers is not None and remote.num_draft_layers is not None:
        yield from fact_rows(DRAFT_FACTS, local, remote)
    sizes = local.shape.cp_size, remote.shape.cp_size
    if min(sizes) > 1 and sizes[0] != sizes[1]:
        yield Incompatibility(
            "cp_size", str(sizes[0]), str(sizes[1]), "use cp 1 on one side, or the same on both"
        )


def _table_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    faults = page_faults(local), page_faults(remote)
    if any(faults):
        ours, theirs = ("; ".join(found) or "consistent" for found in faults)
        yield Incompatibility(
            "page table", ours, theirs, "a rank contradicts itself; run one release on both"
        )


def _page_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    ours, theirs = held_buffers(local), held_buffers(remote)
    yield from _missing_rows(local, remote)
    for owner in ("target", "draft"):
        pairs = [(ours[key], theirs[key]) for key in ours if key[0] == owner and key in theirs]
        for name, (differ, text, advice) in _COMPARED.items():
            values = {(text(a), text(b)) for a, b in pairs if differ(a, b)}
            if values:
                yield Incompatibility(
                    f"{owner} {name}",
                    " / ".join(sorted({value[0] for value in values})),
                    " / ".join(sorted({value[1] for value in values})),
                    advice,
                )


def held_buffers(info: RankInfo) -> dict[BufferKey, Held]:
    """Buffers of a rank with the view and the group that they are in."""
    return {
        (view.owner, buffer.layer_id, buffer.role): (
            view,
            info.page_table.group(view.layer_group),
            buffer,
        )
        for view in info.page_table.views
        for buffer in view.buffers
    }


def _missing_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    """Layers that both should have, and buffers that one of them lacks."""
    ours, theirs = set(held_buffers(local)), set(held_buffers(remote))
    for owner, layers in (
        ("target", _common_stage(local, remote)),
        ("draft", _common_drafts(local, remote)),
    ):
        own = {key for key in ours if key[0] == owner and key[1] in layers}
        their = {key for key in theirs if key[0] == owner and key[1] in layers}
        if own != their:
            yield Incompatibility(
                f"{owner} buffers",
                keys_text(own - their),
                keys_text(their - own),
                "each lists what the other lacks; start both with one model and configuration",
            )


def keys_text(keys: set[BufferKey]) -> str:
    """Roles and layers of some buffers."""
    if not keys:
        return "nothing more"
    roles = sorted({role for _, _, role in keys})
    layers = sorted({layer for _, layer, _ in keys})
    return f"{'+'.join(roles)} of layers {value_text(tuple(layers))}"


def _common_stage(local: RankInfo, remote: RankInfo) -> range:
    ours, theirs = stage(local), stage(remote)
    return range(max(ours[0], theirs[0]), min(ours[1], theirs[1]))


def _common_drafts(local: RankInfo, remote: RankInfo) -> frozenset[int]:
    ours, theirs = (frozenset(info.page_table.draft_layers) for info in (local, remote))
    if len(ours) == local.num_draft_layers and len(theirs) == remote.num_draft_layers:
        return ours | theirs
    # One of them holds some draft layers of a stage, or none: the others are another rank's.
    return ours & theirs


Differ = Callable[[Held, Held], bool]
Text = Callable[[Held], str]


def _page_fact(read: Callable[[PageView], object]) -> tuple[Differ, Text, str]:
    return (
        lambda a, b: read(a[0]) != read(b[0]),
        lambda held: value_text(read(held[0])),
        "pages differ in geometry; start both with one model and configuration",
    )


def _windows_differ(a: Held, b: Held) -> bool:
    # None is a window that covers the longest sequence of its side.
    return None not in (a[1].window, b[1].window) and a[1].window != b[1].window


def _sinks_differ(a: Held, b: Held) -> bool:
    return None not in (a[1].window, b[1].window) and a[1].sink_blocks != b[1].sink_blocks


def _cut_differs(a: Held, b: Held) -> bool:
    same_bits = all(read(a[0]) == read(b[0]) for read in PAGE_FACTS.values())
    return same_bits and splits_bytes(a[0], b[0])


_COMPARED: Final[Mapping[str, tuple[Differ, Text, str]]] = {
    **{name: _page_fact(read) for name, read in PAGE_FACTS.items()},
    "kind": (
        lambda a, b: a[1].kind != b[1].kind,
        lambda held: held[1].kind,
        SAME_MODEL,
    ),
    "window": (_windows_differ, lambda held: value_text(held[1].window), SAME_MODEL),
    "sink_blocks": (_sinks_differ, lambda held: str(held[1].sink_blocks), SAME_MODEL),
    "section cut": (
        _cut_differs,
        lambda held: (
            f"shard {shard_index(held[0])} of {num_shards(held[0])}, sections "
            f"{value_text(held[0].sections)} of {held[0].element}"
        ),
        "elements smaller than a byte cannot be split there; use equal tensor parallel sizes",
    ),
}
"""By name: whether two holders of a buffer differ, what a row shows of each, and the advice."""
