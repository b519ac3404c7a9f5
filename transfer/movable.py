"""Whether sessions can move pages between two ranks: every reason why not, with both values.

Whatever plans map (``check_peer``) can be moved, except that pages that lie differently take two
memories that can stage. Run on both ends before any address is used; ``check_movable(a, b)`` and
``check_movable(b, a)`` give the same rows with the values exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from transfer.compatibility import check_peer, held_buffers
from transfer.incompatibility import Incompatibility, value_text
from transfer.plan import TransferPlan
from transfer.rank_info import RankFacts, RankInfo

LAYOUT: Final = "whole slots move between equal layouts only; start both with one configuration"
STAGE: Final = "pages that lie differently are gathered and scattered, which takes both memories"

PLACES: Final = frozenset(
    {"layer_group", "pool", "pool_group", "slot_bytes", "buffers", "offset_bytes"}
)
"""Fields that say where a rank keeps its pages, not what they are."""


def check_movable(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why sessions cannot move pages between these two ranks; empty when they can."""
    rows = check_peer(local, remote)
    if rows or (local.can_stage and remote.can_stage) or _direct(local, remote):
        return rows
    layout = tuple(_layout_rows(local, remote)) or (_slot_row(local, remote),)
    return (
        *layout,
        Incompatibility("staging", _staging_text(local), _staging_text(remote), STAGE),
    )


def _direct(local: RankInfo, remote: RankInfo) -> bool:
    """Whether whole slots move, whichever of the two sends."""
    plans = TransferPlan.between(local, remote), TransferPlan.between(remote, local)
    return all(group.direct for plan in plans for group in plan.groups)


def _layout_rows(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    """Where the pages of buffers that both hold differ, a row an owner and field. Values come in
    the order of the buffers, so the first of one side differs from the first of the other.
    """
    ours, theirs = held_buffers(local), held_buffers(remote)
    found: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(ours.keys() & theirs.keys()):
        facts: Iterator[tuple[RankFacts, RankFacts]] = zip(ours[key], theirs[key], strict=True)
        for own, their in facts:
            for field, pair in _differing(own, their):
                found.setdefault(f"{key[0]} {field}", []).append(pair)
    for field, pairs in sorted(found.items()):
        yield Incompatibility(
            field,
            " / ".join(dict.fromkeys(pair[0] for pair in pairs)),
            " / ".join(dict.fromkeys(pair[1] for pair in pairs)),
            LAYOUT,
        )


def _differing(own: RankFacts, their: RankFacts) -> Iterator[tuple[str, tuple[str, str]]]:
    theirs = dict(their)
    for field, value in own:
        if field not in PLACES and value != theirs[field]:
            yield field, (value_text(value), value_text(theirs[field]))


def _slot_row(local: RankInfo, remote: RankInfo) -> Incompatibility:
    """Pages are alike and lie in other places of their slots."""
    return Incompatibility("slot layout", _layout_text(local), _layout_text(remote), LAYOUT)


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
