"""Random specs and demands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st

from kvcache_core.sizing_demand import BatchStep, SizingDemand
from kvcache_core.spec import ElementType, KVCacheLayerSpec, ReusePolicy
from tests.kvcache_core.samples import BF16, DRAFT, FP8, FP32, PACKED4, TARGET, index_keys, states

BLOCK = 16


@st.composite
def attention_specs(draw: st.DrawFn) -> KVCacheLayerSpec:
    """An attention layer 0 for blocks of 16 tokens: any dtype, factor, window, page size."""
    dtype: ElementType = draw(st.sampled_from([BF16, FP8, FP32, PACKED4]))
    scales = st.just(8) if dtype is PACKED4 else st.sampled_from([None, 8])
    owner = draw(st.sampled_from([TARGET, DRAFT]))
    window = draw(st.sampled_from([None, 20, 32, 100]))
    extras: list[Any] = [()]
    if owner is TARGET and dtype is not PACKED4:
        extras += [(index_keys(8),), (index_keys(64, FP8),)]
    return KVCacheLayerSpec(
        layer_id=0,
        owner=owner,
        dtype=dtype,
        num_kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 24, 64])),
        kv_factor=draw(st.sampled_from([1, 2])),
        window=window,
        sink_tokens=0 if window is None else draw(st.sampled_from([0, 0, 5, 17])),
        policy=draw(st.sampled_from(list(ReusePolicy))),
        tokens_per_page=draw(st.sampled_from([None, 4, 8])),
        scale_block_elements=draw(scales),
        extra_buffers=draw(st.sampled_from(extras)),
    )


state_specs = st.builds(states, layer_id=st.just(0), elements=st.sampled_from([8, 48, 100]))


def numbered(specs: list[KVCacheLayerSpec]) -> list[KVCacheLayerSpec]:
    """The same specs with ids 0, 1, ...; draft layers beside sparse ones become private, so that
    they have a life cycle of their own.
    """
    sparse = any(spec.extra_buffers for spec in specs)
    private = ReusePolicy.PRIVATE
    result: list[KVCacheLayerSpec] = []
    for index, spec in enumerate(specs):
        policy = spec.policy
        if sparse:
            policy = private if spec.owner is DRAFT else ReusePolicy.REQUIRED
        if sparse and spec.owner is DRAFT and spec.dtype is PACKED4:
            spec = replace(spec, dtype=FP8)
        result.append(replace(spec, layer_id=index, policy=policy))
    return result


def spec_lists(most: int = 6) -> st.SearchStrategy[list[KVCacheLayerSpec]]:
    """Specs of one rank."""
    layers = st.one_of(attention_specs(), attention_specs(), state_specs)
    return st.lists(layers, min_size=1, max_size=most).map(numbered)


demands = st.builds(
    SizingDemand,
    chunk_tokens=st.integers(1, 90),
    resident_sequences=st.integers(1, 5),
    append_tokens=st.integers(1, 20),
    typical_sequence_tokens=st.integers(1, 300),
    snapshots_per_sequence=st.integers(0, 2),
    scratch_tokens=st.integers(0, 20),
    preemption_headroom=st.integers(0, 3),
    dummy_sequences=st.integers(0, 2),
    snapshot_interval_tokens=st.sampled_from([None, 64]),
    usable_percent=st.sampled_from([100, 97, 50]),
    constraints=st.sampled_from([(), (BatchStep(((70, 0), (33, 32))),)]),
)
