"""How pages lie on both ends and what moving them costs: real layouts, tables and plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvcache_core.layout import LayoutPlan
from tests.support.transfers import TOKENS_PER_BLOCK, draft_layer, rank_info, target_layer
from transfer.costs import TransferCosts
from transfer.lease import views_of_groups
from transfer.plan import TransferPlan

BLOCK: Final = TOKENS_PER_BLOCK
WINDOW_TOKENS: Final = 3 * BLOCK


@dataclass(frozen=True)
class Terrain:
    """Layouts of context and generation, the plan between them, and the costs."""

    name: str
    layouts: tuple[LayoutPlan, LayoutPlan]
    plan: TransferPlan
    costs: TransferCosts
    pass_ms: int = 0
    """A gather or scatter takes up to so long, as on a device; with 0 it is over at once."""

    @property
    def views(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """A view for each layer group, of both ends."""
        return views_of_groups(self.layouts[0]), views_of_groups(self.layouts[1])


def _layout(tokens_per_page: int | None = None) -> LayoutPlan:
    """Full attention with a drafter in pools of its own, and a window."""
    specs = [
        target_layer(0, 2),
        replace(target_layer(1, 2), tokens_per_page=tokens_per_page),
        target_layer(2, 1, WINDOW_TOKENS),
        draft_layer(100, 1),
    ]
    return LayoutPlan.derive(specs, tokens_per_block=BLOCK)


def _message_bytes(layout: LayoutPlan) -> int:
    """Two blocks a message: what is staged takes several."""
    return 2 * max(sum(group.slot_bytes) for group in layout.pool_groups)


def _terrain(
    name: str, receiver: LayoutPlan, *, can_stage: bool, costs: TransferCosts, pass_ms: int = 0
) -> Terrain:
    sender = _layout()
    ends = [
        rank_info(layout, name=side).model_copy(
            update={"can_stage": can_stage, "staging_message_bytes": _message_bytes(layout)}
        )
        for side, layout in (("c", sender), ("g", receiver))
    ]
    return Terrain(name, (sender, receiver), TransferPlan.between(*ends), costs, pass_ms)


WHOLE: Final = _terrain("whole", _layout(), can_stage=False, costs=TransferCosts())
"""Runs of slots."""
STAGED: Final = _terrain("staged", _layout(), can_stage=True, costs=TransferCosts(message_us=1e6))
"""Messages are so dear that all is gathered."""
MIXED: Final = _terrain(
    "mixed", _layout(BLOCK // 2), can_stage=True, costs=TransferCosts(message_us=0), pass_ms=40
)
"""Kernel pages of one layer differ, so that its group has to be gathered; the window's does not."""
TERRAINS: Final = (WHOLE, STAGED, MIXED)
