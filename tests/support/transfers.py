"""Rank facts and transfer plans made from real layout plans, for tests of the transfer package."""

from __future__ import annotations

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from transfer.identity import Incarnation
from transfer.page_table import TotalHeads, draft_facts, page_table_of
from transfer.rank_info import EngineFacts, ParallelShape, RankInfo

TOKENS_PER_BLOCK = 8
FACTS = EngineFacts(
    model="tiny",
    model_hash="abc",
    rope=(("theta", "10000.0"),),
    kv_dtype="float16",
    attention="grouped",
)


def target_layer(layer_id: int, heads: int, window: int | None = None) -> KVCacheLayerSpec:
    """One target layer of head_dim 16."""
    return KVCacheLayerSpec(
        layer_id=layer_id,
        owner=KVCacheLayerOwner.TARGET,
        dtype=ElementType.FLOAT16,
        num_kv_heads=heads,
        head_dim=16,
        window=window,
    )


def draft_layer(layer_id: int, heads: int) -> KVCacheLayerSpec:
    """One draft layer of head_dim 8 in another dtype."""
    return KVCacheLayerSpec(
        layer_id=layer_id,
        owner=KVCacheLayerOwner.DRAFT,
        dtype=ElementType.BFLOAT16,
        num_kv_heads=heads,
        head_dim=8,
    )


def layout(
    *, heads: int = 2, draft_heads: int = 0, layers: tuple[int, ...] = (0, 1, 2, 3)
) -> LayoutPlan:
    """Target layers, every second one windowed, and with ``draft_heads`` one draft layer."""
    specs = [target_layer(layer, heads, 24 if layer % 2 else None) for layer in layers]
    if draft_heads:
        specs.append(draft_layer(100, draft_heads))
    return LayoutPlan.derive(specs, tokens_per_block=TOKENS_PER_BLOCK)


def rank_info(
    plan: LayoutPlan | None = None,
    *,
    name: str = "a",
    shape: ParallelShape | None = None,
    total_heads: TotalHeads | None = None,
    layers_per_stage: tuple[int, ...] = (4,),
) -> RankInfo:
    """Facts of a rank that has this layout."""
    plan = plan or layout(draft_heads=2)
    shape = shape or ParallelShape()
    drafts = draft_facts(plan)
    return RankInfo(
        incarnation=Incarnation(instance=name, nonce="0"),
        rank=0,
        shape=shape,
        layers_per_stage=layers_per_stage,
        tokens_per_block=plan.tokens_per_block,
        engine=FACTS,
        num_draft_layers=drafts[0] if drafts else None,
        draft_kv_dtype=drafts[1] if drafts else None,
        page_table=page_table_of(plan, shape, total_heads),
        data_host="127.0.0.1",
        data_port=1,
    )
