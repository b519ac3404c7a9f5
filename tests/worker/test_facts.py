"""What peers are told of a rank's element types."""

from __future__ import annotations

from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from worker.facts import kv_dtypes

TARGET, DRAFT = KVCacheLayerOwner.TARGET, KVCacheLayerOwner.DRAFT


def layer(number: int, owner: KVCacheLayerOwner, dtype: ElementType) -> KVCacheLayerSpec:
    return KVCacheLayerSpec(layer_id=number, owner=owner, dtype=dtype, num_kv_heads=1, head_dim=8)


def test_the_types_of_all_target_layers_count_in_no_order() -> None:
    specs = [
        layer(0, TARGET, ElementType.FLOAT8_E4M3),
        layer(1, TARGET, ElementType.BFLOAT16),
        layer(2, DRAFT, ElementType.FLOAT16),
    ]
    assert kv_dtypes(specs) == kv_dtypes(specs[::-1]) == "bfloat16+float8_e4m3"
    assert kv_dtypes(specs[1:]) == "bfloat16"
