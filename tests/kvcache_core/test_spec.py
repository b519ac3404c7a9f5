"""What layer specs say, what they refuse, and the rules for draft and sparse layers among them."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_core.agreement import (
    LayerDeclaration,
    require_agreement,
    require_relocatable,
    spec_mismatches,
)
from kvcache_core.draft_layers import (
    append_draft_layers,
    draft_layer_range,
    resolve_draft_dtype,
    with_private_drafts,
)
from kvcache_core.sparse import SparseSplit, sparse_layer_ids, sparse_specs
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    IndexKind,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    layer_ids,
    normalized_window,
    owner_of,
)
from tests.kvcache_core.samples import (
    BF16,
    DRAFT,
    FP8,
    OPTIONAL,
    PACKED4,
    PRIVATE,
    TARGET,
    attention,
    derive,
    draft,
    index_keys,
    packed,
    states,
)

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
        ({"dtype": ElementType.PACKED4}, "needs scale_block_elements"),
        ({"scale_block_elements": 48}, "must divide head_dim 128"),
        ({"scale_block_elements": 16, "scale_coalescing_group": 0}, "different coalescing groups"),
    ],
)
def test_k02_impossible_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheLayerSpec(**{**BASE, **changes})


@pytest.mark.parametrize("head_dim", [127, 1])
def test_b05_packed_data_needs_an_even_head_dim(head_dim: int) -> None:
    """Half a byte would be rounded away: head_dim 1 made a dimension of zero bytes."""
    with pytest.raises(ValueError, match=f"even head_dim, got {head_dim}"):
        attention(0, PACKED4, 2, head_dim, scale_block_elements=1)


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
        ({"dtype": PACKED4, "scale_block_elements": 32, "kv_factor": 1}, 8 * (64 + 4)),
    ],
)
def test_b01_bytes_per_token_follow_the_dtype(changes: dict[str, Any], expected: int) -> None:
    """There is no path without specs to compare with: the plan's bytes are compared instead."""
    spec = KVCacheLayerSpec(**{**BASE, **changes})
    assert spec.bytes_per_token == expected
    assert derive(spec).bytes_per_token == expected


def test_k01_one_function_tells_the_owner_and_owners_share_no_view() -> None:
    """Equal heads, dtype, window and policy: one life cycle and one pool, but two views."""
    plan = derive(attention(0, heads=4), draft(61, heads=4), attention(1, heads=4))
    assert plan.draft_layer_ids == layer_ids(plan.specs, DRAFT) == (61,)
    assert [plan.owner(layer) for layer in plan.layer_ids] == [TARGET, TARGET, DRAFT]
    assert len(plan.layer_groups) == 1
    assert plan.layer_groups[0].draft_layer_ids == (61,)
    assert [(v.owner, [b.layer_id for b in v.buffers]) for v in plan.views] == [
        (TARGET, [0, 0, 1, 1]),
        (DRAFT, [61, 61]),
    ]
    assert plan.views[0].geometry == plan.views[1].geometry


def test_b19_appended_draft_layers_are_draft_in_every_view() -> None:
    target = [attention(layer, heads=2) for layer in range(3)]
    specs = append_draft_layers(target, [draft(0, heads=2)], num_target_layers=60)
    assert [spec.layer_id for spec in specs] == [0, 1, 2, 60]
    plan = derive(*specs)
    for view in plan.views:
        assert {plan.owner(buffer.layer_id) for buffer in view.buffers} == {view.owner}
    assert len(plan.views) == 2
    with pytest.raises(KeyError, match="no layer 7"):
        owner_of(specs, 7)


def declaration(spec: KVCacheLayerSpec, **changes: Any) -> LayerDeclaration:
    facts: dict[str, Any] = {
        "layer_id": spec.layer_id,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "kv_factor": spec.kv_factor,
        "dtype": spec.dtype,
    }
    return LayerDeclaration(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "layer 3 num_kv_heads: spec 8, model 4"),
        ({"head_dim": 64}, "layer 3 head_dim: spec 128, model 64"),
        ({"kv_factor": 1}, "layer 3 kv_factor: spec 2, model 1"),
        ({"dtype": FP8}, "layer 3 dtype: spec bfloat16, model float8_e4m3"),
    ],
)
def test_k04_specs_that_contradict_the_model_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    specs = [attention(2, BF16, 8, 128), attention(3, BF16, 8, 128), states(4)]
    same = [declaration(spec) for spec in specs]
    assert spec_mismatches(specs, same) == ()
    require_agreement(specs, same)
    different = [declaration(s, **(changes if s.layer_id == 3 else {})) for s in specs]
    assert [str(found) for found in spec_mismatches(specs, different)] == [message]
    with pytest.raises(ValueError, match=message):
        require_agreement(specs, different)


def test_k04_placement_and_all_mismatches_at_once() -> None:
    """A pipeline stage that has layers 2 and 3, and a model that has 3 and 4."""
    specs = [attention(2), attention(3, BF16, 2, 64)]
    declared = [declaration(specs[1], num_kv_heads=1, dtype=FP8), declaration(attention(4))]
    assert [str(found) for found in spec_mismatches(specs, declared)] == [
        "layer 2 placement: spec on this rank, model not on this rank",
        "layer 3 num_kv_heads: spec 2, model 1",
        "layer 3 dtype: spec bfloat16, model float8_e4m3",
        "layer 4 placement: spec not on this rank, model on this rank",
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (attention(1, FP8), "dtype"),
        (attention(1, head_dim=32), "head_dim"),
        (attention(1, heads=3), "num_kv_heads"),
        (attention(1, kv_factor=1), "kv_factor"),
        (attention(1, tokens_per_page=32), "tokens_per_page"),
        (attention(1, scale_block_elements=16), "key_scale"),
        (states(1), r"recurrent layers \[1\]"),
    ],
)
def test_k14_relocation_is_refused_in_mixed_layouts(other: KVCacheLayerSpec, message: str) -> None:
    require_relocatable([attention(0), attention(1, window=9), draft(2)])
    with pytest.raises(ValueError, match=message):
        require_relocatable([attention(0), other])


def test_k18_extra_buffers_answer_for_their_bytes() -> None:
    spec = attention(0, FP8, 4, 128, extra_buffers=(index_keys(128),))
    assert spec.role_bytes_per_token(BufferRole.INDEX_KEY) == 256
    assert spec.role_bytes_per_token(BufferRole.KEY) == 512
    assert spec.role_bytes_per_token(BufferRole.KEY_SCALE) == 0
    assert spec.bytes_per_token == 512 + 512 + 256
    plan = derive(spec, attention(1, FP8, 4, 128))
    assert plan.address(0, BufferRole.INDEX_KEY).bytes == 256 * 64
    assert plan.bytes_per_token == 2 * 1024 + 256
    assert states(2).role_bytes_per_token(BufferRole.RECURRENT_STATE) == 0


@pytest.mark.parametrize("local", [range(6), range(4, 6)])
@pytest.mark.parametrize("declared", [None, frozenset({3, 5})])
@pytest.mark.parametrize("drafts", [0, 1])
def test_k19_dense_layers_of_a_packed_cache_are_fp8(
    local: range, declared: frozenset[int] | None, drafts: int
) -> None:
    """Default or the checkpoint's split, all layers or a pipeline stage's, with draft or without.

    A stage that holds layers 4 and 5 must not take 4 for its first, hence dense.
    """
    extras = [(index_keys(),) if n in (declared or {3, 4, 5}) else () for n in range(6)]
    specs = [packed(layer, 4, 128, extra_buffers=extras[layer]) for layer in local]
    specs += [draft(6 + layer, heads=4, head_dim=128, policy=OPTIONAL) for layer in range(drafts)]
    split = SparseSplit(num_target_layers=6, sparse=declared)
    sparse = set(declared or {3, 4, 5}) & set(local)
    for spec in sparse_specs(specs, split, PACKED4):
        if spec.owner is DRAFT:
            assert (spec.dtype, spec.index_kind) == (BF16, IndexKind.PER_LAYER)
            assert not split.is_sparse(spec)
            continue
        assert spec.index_kind is IndexKind.RAW_SLOT
        assert spec.dtype is (PACKED4 if spec.layer_id in sparse else FP8)
        if spec.dtype is FP8:
            assert spec.role_bytes_per_token(BufferRole.KEY) == 512
            assert spec.role_bytes_per_token(BufferRole.KEY_SCALE) == 0


def test_k19_other_cache_dtypes_are_kept() -> None:
    specs = [attention(0, FP8), attention(1, FP8, extra_buffers=(index_keys(),)), draft(2)]
    split = SparseSplit(num_target_layers=2, sparse=frozenset({1}))
    assert [spec.dtype for spec in sparse_specs(specs, split, FP8)] == [FP8, FP8, BF16]


def test_k19_index_keys_must_agree_with_the_checkpoints_split() -> None:
    """A layer that lost its index keys, or kept them, is an error and no other kind of layer."""
    split = SparseSplit(num_target_layers=6)
    with pytest.raises(
        ValueError, match="layer 4 has no index keys, but the checkpoint's split say"
    ):
        sparse_specs([packed(4)], split, PACKED4)
    with pytest.raises(ValueError, match=r"layer 2 has index keys, but .* says dense"):
        sparse_specs([packed(2, extra_buffers=(index_keys(),))], split, PACKED4)


def test_b54_sparse_layers_are_target_layers() -> None:
    specs = [attention(0), attention(3, extra_buffers=(index_keys(),)), draft(4)]
    assert sparse_layer_ids(specs) == (3,)
    odd = draft(4, extra_buffers=(index_keys(),))
    assert sparse_layer_ids([*specs[:2], odd]) == (3,)
    split = SparseSplit(num_target_layers=4, sparse=frozenset({3, 4}))
    assert [split.is_sparse(spec) for spec in (*specs[:2], odd)] == [False, True, False]
    with pytest.raises(ValueError, match="draft layer 4 has index keys"):
        derive(*specs[:2], odd)


SPARSE = attention(0, FP8, extra_buffers=(index_keys(),))


def test_k20_packed_draft_beside_sparse_layers_is_refused() -> None:
    """Restated as a rule of the plan; without sparse layers a packed drafter is as good as any."""
    derive(attention(0), packed(1, owner=DRAFT))
    with pytest.raises(ValueError, match="draft layer 1 is packed 4-bit; beside sparse layers"):
        derive(SPARSE, packed(1, owner=DRAFT, policy=OPTIONAL))


def test_k20_target_layers_need_the_cache_dtype() -> None:
    with pytest.raises(ValueError, match="target layer 0 is float8_e4m3, the cache is bfloat16"):
        sparse_specs([SPARSE], SparseSplit(num_target_layers=1, dense_prefix=0), BF16)


def test_k20_draft_needs_a_life_cycle_of_its_own() -> None:
    with pytest.raises(ValueError, match="draft layer 1 has the life cycle of target layer 0"):
        derive(SPARSE, draft(1))
    with pytest.raises(ValueError, match="life cycle of target layer 0"):
        # the window covers the longest sequence, so that it is full attention after all
        derive(SPARSE, draft(1, window=4096), longest=4096)
    derive(SPARSE, draft(1, window=4095), longest=4096)
    derive(SPARSE, draft(1, policy=OPTIONAL))


def test_k20_transferred_draft_pages_are_head_major() -> None:
    """Keys and values of a spec are head-major by construction; an extra VALUE need not be."""
    values = BufferSpec(
        role=BufferRole.VALUE,
        dtype=BF16,
        num_heads=1,
        elements_per_head=64,
        mapping=PageMapping.REPLICATED,
    )
    with pytest.raises(ValueError, match="draft layer 1 has value pages that are replicated"):
        derive(attention(0), draft(1, kv_factor=1, extra_buffers=(values,)))
    derive(attention(0), draft(1, kv_factor=1, extra_buffers=(values,), policy=PRIVATE))
    derive(attention(0, kv_factor=1, extra_buffers=(values,)))


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, BF16),
        ("bfloat16", BF16),
        (BF16, BF16),
        ("torch.float8_e4m3fn", FP8),
        ("float8_e4m3fn", FP8),
        (FP8, FP8),
    ],
)
def test_k29_draft_dtype_is_declared_or_the_weights(
    declared: ElementType | str | None, expected: ElementType
) -> None:
    dtype = resolve_draft_dtype(declared, BF16)
    assert dtype is expected
    plan = derive(attention(0, PACKED4, scale_block_elements=16), draft(1, dtype))
    assert plan.spec(1).dtype is expected


@pytest.mark.parametrize("declared", ["fp8", "", "float64", "int8", "packed4", "uint8", 8, PACKED4])
def test_b22_an_invalid_draft_dtype_is_not_an_absent_one(declared: Any) -> None:
    with pytest.raises(ValueError, match=r"element type|not possible"):
        resolve_draft_dtype(declared, BF16)


@pytest.mark.parametrize("declared", ["float16", "torch.float32", ElementType.FLOAT16])
def test_b23_a_conflicting_draft_dtype_is_refused(declared: Any) -> None:
    with pytest.raises(ValueError, match="conflicts with drafter weights of bfloat16"):
        resolve_draft_dtype(declared, BF16)
    with pytest.raises(ValueError, match="weights must be one of"):
        resolve_draft_dtype(declared, FP8)


def test_b53_draft_tail_is_anchored_on_the_number_of_target_layers() -> None:
    """60 target layers and one draft layer, with a head list of either length: the tail is 60.

    A tail guessed from 60 and 61 took layer 59 for the drafter's and dropped its index keys.
    """
    assert list(draft_layer_range(60, 1, 8)) == [60]
    assert list(draft_layer_range(60, 1, [8] * 60)) == [60]
    assert list(draft_layer_range(60, 1, [8] * 61)) == [60]
    assert list(draft_layer_range(60, 0, [8] * 60)) == []
    for length in (59, 62):
        with pytest.raises(ValueError, match=f"{length} kv head counts fit neither 60"):
            draft_layer_range(60, 1, [8] * length)
    with pytest.raises(ValueError, match="at least one target layer"):
        draft_layer_range(0, 1, 8)
    target = [attention(layer, FP8, extra_buffers=(index_keys(),)) for layer in (58, 59)]
    specs = append_draft_layers(target, [draft(0, policy=OPTIONAL)], num_target_layers=60)
    plan = derive(*specs)
    assert (sparse_layer_ids(plan.specs), plan.draft_layer_ids) == ((58, 59), (60,))
    # a stage without draft layers has none, whatever the checkpoint has
    assert derive(*append_draft_layers(target, [], num_target_layers=60)).draft_layer_ids == ()


def test_k31_appending_checks_owners_and_numbers() -> None:
    with pytest.raises(ValueError, match="none of the checkpoint's 2 target layers"):
        append_draft_layers([attention(2)], [], num_target_layers=2)
    with pytest.raises(ValueError, match=r"layer 1 \(draft\) is none"):
        append_draft_layers([draft(1)], [], num_target_layers=2)
    with pytest.raises(ValueError, match="draft layer 0 has owner target"):
        append_draft_layers([attention(0)], [attention(0)], num_target_layers=1)


def test_sharing_off_makes_draft_layers_private() -> None:
    specs = with_private_drafts([attention(0), draft(1), draft(2, policy=OPTIONAL)])
    plan = derive(*specs)
    assert [spec.policy.value for spec in specs] == ["required", "private", "private"]
    assert plan.transferable_groups() == (0,)


def test_owners_and_states() -> None:
    specs = [attention(0), draft(1), states(2)]
    assert owner_of(specs, 1) is DRAFT
    assert layer_ids(specs, TARGET) == (0, 2)
    assert (specs[2].bytes_per_token, specs[2].state_bytes) == (0, 2 * 48 * 4)


@pytest.mark.parametrize(
    ("window", "longest", "expected"),
    [(None, None, None), (100, None, 100), (100, 100, None), (100, 101, 100), (None, 5, None)],
)
def test_k05_window_that_limits_nothing_is_none(
    window: int | None, longest: int | None, expected: int | None
) -> None:
    assert normalized_window(window, longest) == expected
