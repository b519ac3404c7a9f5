"""Validation and byte arithmetic of layer specs."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    layer_ids,
    normalized_window,
    owner_of,
)
from tests.kvcache_core.support import DRAFT, TARGET, layer, state_layer

BASE: dict[str, Any] = {
    "layer_id": 0,
    "owner": KVCacheLayerOwner.TARGET,
    "dtype": ElementType.BFLOAT16,
    "num_kv_heads": 8,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_id": -1}, "layer_id"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"kv_factor": 3}, "kv_factor must be 1"),
        ({"kv_factor": 0}, "kv_factor must be 1"),
        ({"window": 0}, "window must be positive"),
        ({"sink_tokens": 4}, "needs a window"),
        ({"dtype": ElementType.PACKED4, "head_dim": 127}, "even head_dim, got 127"),
        ({"dtype": ElementType.PACKED4}, "needs scale_block_elements"),
        ({"scale_block_elements": 48}, "must divide head_dim 128"),
        ({"scale_block_elements": 16, "scale_coalescing_group": 0}, "different coalescing groups"),
    ],
)
def test_impossible_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheLayerSpec(**{**BASE, **changes})


def test_buffers_are_refused_with_their_role() -> None:
    with pytest.raises(ValueError, match="index_key buffer: sections belong"):
        BufferSpec(
            role=BufferRole.INDEX_KEY,
            dtype=ElementType.UINT8,
            num_heads=1,
            elements_per_head=8,
            mapping=PageMapping.SECTIONED,
        )
    with pytest.raises(ValueError, match="sections sum to 7"):
        BufferSpec(
            role=BufferRole.CONV_STATE,
            dtype=ElementType.UINT8,
            num_heads=1,
            elements_per_head=8,
            mapping=PageMapping.SECTIONED,
            sections=(4, 3),
        )
    with pytest.raises(ValueError, match="whole bytes"):
        BufferSpec(
            role=BufferRole.INDEX_KEY,
            dtype=ElementType.PACKED4,
            num_heads=2,
            elements_per_head=3,
        )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * 8 * 128 * 2),
        ({"kv_factor": 1}, 8 * 128 * 2),
        ({"dtype": ElementType.FLOAT8_E4M3}, 2 * 8 * 128),
        ({"dtype": ElementType.FLOAT32}, 2 * 8 * 128 * 4),
        # half a byte an element and one scale byte for sixteen of them
        ({"dtype": ElementType.PACKED4, "scale_block_elements": 16}, 2 * 8 * (64 + 8)),
    ],
)
def test_bytes_per_token(changes: dict[str, Any], expected: int) -> None:
    assert KVCacheLayerSpec(**{**BASE, **changes}).bytes_per_token == expected


def test_owners_and_states() -> None:
    specs = [layer(0), layer(1, owner=DRAFT), state_layer(2)]
    assert owner_of(specs, 1) is DRAFT
    assert layer_ids(specs, TARGET) == (0, 2)
    assert (specs[2].bytes_per_token, specs[2].state_bytes) == (0, 2 * 48 * 4)
    with pytest.raises(KeyError, match="no layer 7"):
        owner_of(specs, 7)


@pytest.mark.parametrize(
    ("window", "longest", "expected"),
    [(None, None, None), (100, None, 100), (100, 100, None), (100, 101, 100), (None, 5, None)],
)
def test_window_that_limits_nothing_is_none(
    window: int | None, longest: int | None, expected: int | None
) -> None:
    assert normalized_window(window, longest) == expected
