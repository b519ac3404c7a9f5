"""What peers are told about this rank before any page moves: engine facts and the page table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole, KVCacheLayerOwner, KVCacheLayerSpec
from transfer.identity import Incarnation
from transfer.page_table import draft_facts, page_table_of
from transfer.rank_info import EngineFacts, ParallelShape, RankInfo
from worker.model.loader import LoadedModel

_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
)
"""Configuration that differs between copies of one model."""


def rank_infos(
    loaded: LoadedModel,
    plan: LayoutPlan,
    *,
    model_path: str,
    model_name: str,
    incarnation: Incarnation,
) -> tuple[RankInfo, ...]:
    """Facts of all ranks of an instance, as each of them knows them: layouts are the same on all.
    The agent fills in the data address.
    """
    facts = engine_facts(loaded, model_path=model_path, model_name=model_name)
    drafts = draft_facts(plan)
    heads = {
        (spec.layer_id, role): loaded.whole_facts.num_kv_heads
        for spec in loaded.specs
        for role in (BufferRole.KEY, BufferRole.VALUE)
    }
    size = loaded.ranks.shard.size
    shapes = [ParallelShape(tp_size=size, tp_rank=rank) for rank in range(size)]
    return tuple(
        RankInfo(
            incarnation=incarnation,
            rank=shape.tp_rank,
            shape=shape,
            layers_per_stage=(loaded.facts.num_layers,),
            tokens_per_block=plan.tokens_per_block,
            engine=facts,
            num_draft_layers=None if drafts is None else drafts[0],
            draft_kv_dtype=None if drafts is None else drafts[1],
            page_table=page_table_of(plan, shape, heads),
            data_host="",
            data_port=0,
        )
        for shape in shapes
    )


def engine_facts(loaded: LoadedModel, *, model_path: str, model_name: str) -> EngineFacts:
    """Everything that changes the numbers in a page."""
    config: dict[str, Any] = {
        name: value for name, value in loaded.configuration.items() if name not in _NOT_OF_THE_MODEL
    }
    rope = {name: config[name] for name in ("rope_parameters", "rope_theta") if name in config}
    return EngineFacts(
        model=model_name,
        model_hash=_digest(config, Path(model_path)),
        rope=tuple(sorted((name, _text(value)) for name, value in rope.items())),
        kv_dtype=kv_dtypes(loaded.specs),
        kv_scales="none" if loaded.kv_scales is None else loaded.kv_scales.text,
        attention="grouped",
    )


def kv_dtypes(specs: Iterable[KVCacheLayerSpec]) -> str:
    """Element types of the target layers, whatever their order; a drafter's are told apart."""
    found = {spec.dtype.value for spec in specs if spec.owner is KVCacheLayerOwner.TARGET}
    return "+".join(sorted(found))


def _digest(config: dict[str, Any], path: Path) -> str:
    """Digest of the configuration and of names and sizes of the weight files."""
    place = path.expanduser()
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    weights = [(file.name, file.stat().st_size) for file in files]
    return hashlib.sha256(_text([config, weights]).encode()).hexdigest()


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
