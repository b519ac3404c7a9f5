"""How pages lie on both ends and what moving them costs: real layouts, tables and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import KVCacheLayerSpec
from tests.support.transfers import TOKENS_PER_BLOCK, draft_layer, rank_info, target_layer
from transfer.costs import TransferCosts
from transfer.lease import views_of_groups
from transfer.plan import TransferPlan
from transfer.rank_info import ParallelShape, RankInfo

BLOCK: Final = TOKENS_PER_BLOCK
WINDOW_TOKENS: Final = 3 * BLOCK
LAYERS: Final = 3


@dataclass(frozen=True)
class Site:
    """One rank of an instance: how its pages lie, and what it tells its peers."""

    layout: LayoutPlan
    info: RankInfo

    @property
    def views(self) -> Mapping[int, int]:
        """A view for each layer group."""
        return views_of_groups(self.layout)

    @property
    def parts(self) -> Mapping[tuple[int, int], str]:
        """The layers that lie in a pool, by pool group and pool: the same on every rank."""
        table = self.info.page_table
        layers: dict[tuple[int, int], set[int]] = {}
        for view in table.views:
            key = (table.group(view.layer_group).pool_group, view.pool)
            layers.setdefault(key, set()).update(buffer.layer_id for buffer in view.buffers)
        return {key: str(sorted(found)) for key, found in layers.items()}


@dataclass(frozen=True)
class Terrain:
    """Ranks of every context and every generation instance, the plans between them, the costs."""

    name: str
    contexts: tuple[Site, ...]
    generations: tuple[Site, ...]
    costs: TransferCosts
    pass_ms: int = 0
    """A gather or scatter takes up to so long, as on a device; with 0 it is over at once."""

    @property
    def sides(self) -> tuple[tuple[Site, ...], tuple[Site, ...]]:
        """Contexts and generations."""
        return self.contexts, self.generations

    @cached_property
    def plans(self) -> Mapping[tuple[int, int], TransferPlan]:
        """By context rank and generation rank."""
        return {
            (c.info.rank, g.info.rank): TransferPlan.between(c.info, g.info)
            for c in self.contexts
            for g in self.generations
        }

    @property
    def stages(self) -> bool:
        """Whether pages can be gathered and scattered."""
        return self.plans[0, 0].stages


def _specs(tokens_per_page: int | None = None) -> list[KVCacheLayerSpec]:
    """Full attention with a drafter in pools of its own, and a window."""
    return [
        target_layer(0, 2),
        replace(target_layer(1, 2), tokens_per_page=tokens_per_page),
        target_layer(2, 1, WINDOW_TOKENS),
        draft_layer(100, 1),
    ]


def _stages() -> list[list[KVCacheLayerSpec]]:
    """A layer group each, so that every rank of an instance moves whole slots."""
    return [[target_layer(0, 2), target_layer(1, 2)], [target_layer(2, 1, WINDOW_TOKENS)]]


def _undivided() -> list[list[KVCacheLayerSpec]]:
    """The layers of ``_stages`` on one rank."""
    return [[spec for stage in _stages() for spec in stage]]


def _instance(stages: Sequence[list[KVCacheLayerSpec]], *, can_stage: bool) -> tuple[Site, ...]:
    """A rank a pipeline stage."""
    layers = tuple(sum(spec.layer_id < LAYERS for spec in specs) for specs in stages)
    sites = []
    for rank, specs in enumerate(stages):
        layout = LayoutPlan.derive(specs, tokens_per_block=BLOCK)
        shape = ParallelShape(pp_size=len(stages), pp_rank=rank)
        info = rank_info(layout, shape=shape, layers_per_stage=layers)
        # Two blocks a message: what is staged takes several.
        message_bytes = 2 * max(sum(group.slot_bytes) for group in layout.pool_groups)
        told = {"rank": rank, "can_stage": can_stage, "staging_message_bytes": message_bytes}
        sites.append(Site(layout, info.model_copy(update=told)))
    return tuple(sites)


_NO_MESSAGES: Final = TransferCosts(message_us=1e6)
"""Messages are so dear that all is gathered."""
WHOLE: Final = Terrain(
    "whole",
    _instance([_specs()], can_stage=False),
    _instance([_specs()], can_stage=False),
    TransferCosts(),
)
"""Runs of slots."""
STAGED: Final = Terrain(
    "staged",
    _instance([_specs()], can_stage=True),
    _instance([_specs()], can_stage=True),
    _NO_MESSAGES,
)
MIXED: Final = Terrain(
    "mixed",
    _instance([_specs()], can_stage=True),
    _instance([_specs(BLOCK // 2)], can_stage=True),
    TransferCosts(message_us=0),
    pass_ms=40,
)
"""Kernel pages of one layer differ, so that its group has to be gathered; the window's does not."""
TERRAINS: Final = (WHOLE, STAGED, MIXED)
FAN_IN: Final = Terrain(
    "fan in",
    _instance(_stages(), can_stage=True),
    _instance(_undivided(), can_stage=True),
    TransferCosts(message_us=0),
)
"""Two stages send to one rank, runs of slots."""
FAN_OUT: Final = Terrain(
    "fan out",
    _instance(_undivided(), can_stage=True),
    _instance(_stages(), can_stage=True),
    _NO_MESSAGES,
    pass_ms=20,
)
"""One rank sends to two stages, everything gathered."""
RANKED: Final = (FAN_IN, FAN_OUT)
