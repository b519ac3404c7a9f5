"""What sessions cannot move is refused: one row a field, both values, the same from either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
)
from tests.support.transfers import draft_layer, layout, rank_info, target_layer
from tests.transfer.changed import Json, leaves, with_value
from transfer.direct import check_direct
from transfer.incompatibility import Incompatibility
from transfer.plan import TransferPlan
from transfer.rank_info import ParallelShape, RankInfo

BASE = rank_info()


ROWS: list[tuple[str, tuple[str | int, ...], object]] = [
    ("protocol", ("protocol",), 99),
    ("tokens_per_block", ("tokens_per_block",), 16),
    ("model", ("engine", "model"), "other"),
    ("model_hash", ("engine", "model_hash"), "def"),
    ("rope", ("engine", "rope"), (("theta", "500000.0"),)),
    ("attention", ("engine", "attention"), "latent"),
    ("kv_dtype", ("engine", "kv_dtype"), "float8_e4m3"),
    ("kv_scales", ("engine", "kv_scales"), "per head float32"),
    ("num_layers", ("layers_per_stage",), (5,)),
    ("num_draft_layers", ("num_draft_layers",), 2),
    ("draft_kv_dtype", ("draft_kv_dtype",), "float16"),
    ("attention_tp_size", ("shape", "tp_size"), 2),
    ("cp_size", ("shape", "cp_size"), 2),
    ("target mapping", ("page_table", "views", 0, "mapping"), "replicated"),
    ("target element", ("page_table", "views", 0, "element"), "bfloat16"),
    ("target total_heads", ("page_table", "views", 0, "total_heads"), 4),
    ("target num_heads", ("page_table", "views", 0, "num_heads"), 1),
    ("target first_head", ("page_table", "views", 0, "first_head"), 1),
    ("target elements_per_head", ("page_table", "views", 0, "elements_per_head"), 32),
    ("target tokens_per_page", ("page_table", "views", 0, "tokens_per_page"), 4),
    ("target pages_per_block", ("page_table", "views", 0, "pages_per_block"), 2),
    ("target page_bytes", ("page_table", "views", 0, "page_bytes"), 256),
    ("target page_stride_bytes", ("page_table", "views", 0, "page_stride_bytes"), 1024),
    ("target sections", ("page_table", "views", 0, "sections"), (1, 2)),
    ("target kind", ("page_table", "groups", 0, "kind"), "state"),
    ("page kind", ("page_table", "groups", 0, "kind"), "state"),
    ("target window", ("page_table", "groups", 1, "window"), 32),
    ("target sink_blocks", ("page_table", "groups", 1, "sink_blocks"), 1),
    ("page table", ("page_table", "views", 0, "buffers", 0, "offset_bytes"), 64),
    ("target size_bytes", ("page_table", "views", 0, "buffers", 0, "size_bytes"), 64),
    ("slot layout", ("page_table", "groups", 0, "slot_bytes", 0), 8192),
    ("target buffers", ("page_table", "views", 0, "buffers", 0, "layer_id"), 9),
    ("target buffers", ("page_table", "views", 0, "buffers", 0, "role"), "index_key"),
]


def mirrored(rows: tuple[Incompatibility, ...]) -> set[Incompatibility]:
    return {Incompatibility(row.field, row.remote, row.local, row.advice) for row in rows}


@pytest.mark.parametrize(("field", "path", "value"), ROWS)
def test_a_changed_field_gives_its_row_on_both_sides(
    field: str, path: tuple[str | int, ...], value: object
) -> None:
    other = with_value(BASE, path, value)
    rows = check_direct(BASE, other)
    assert field in [row.field for row in rows]
    assert set(check_direct(other, BASE)) == mirrored(rows)
    row = next(row for row in rows if row.field == field)
    assert row.local != row.remote
    assert row.local in str(row)
    assert row.remote in str(row)


def test_equal_facts_pair_whatever_the_process() -> None:
    other = rank_info(name="b").model_copy(
        update={"rank": 3, "data_host": "10.0.0.2", "data_port": 9}
    )
    assert check_direct(BASE, other) == ()


def test_pool_group_numbers_are_private_to_a_rank() -> None:
    groups = tuple(
        group.model_copy(update={"pool_group": group.pool_group + 5})
        for group in BASE.page_table.groups
    )
    table = BASE.page_table.model_copy(update={"groups": groups})
    assert check_direct(BASE, BASE.model_copy(update={"page_table": table})) == ()


def test_all_reasons_come_at_once() -> None:
    other = with_value(with_value(BASE, ("tokens_per_block",), 16), ("engine", "model"), "other")
    rows = check_direct(BASE, other)
    assert {"tokens_per_block", "model"} <= {row.field for row in rows}
    assert "ours is 8, the peer's is 16" in "\n".join(str(row) for row in rows)


FREE: list[Callable[[tuple[str | int, ...]], bool]] = [
    lambda path: path[0] in ("incarnation", "rank", "data_host", "data_port"),
    lambda path: path[-1] == "pool_group",
    # Attention data parallel groups only say which ranks share a sequence.
    lambda path: path[0] == "shape" and str(path[-1]).startswith("dp_"),
]
LEAVES = [path for path in leaves(BASE.model_dump()) if not any(free(path) for free in FREE)]


@given(path=st.sampled_from(LEAVES), step=st.integers(1, 40), data=st.data())
def test_any_single_change_is_reported_or_refused_when_read(
    path: tuple[str | int, ...], step: int, data: st.DataObject
) -> None:
    node: Json = BASE.model_dump()
    for key in path:
        node = node[key]
    value = node + step if isinstance(node, int) else node + data.draw(st.sampled_from("xyz"))
    try:
        other = with_value(BASE, path, value)
    except ValueError:
        return
    rows = check_direct(BASE, other)
    assert rows
    assert set(check_direct(other, BASE)) == mirrored(rows)


def test_an_extra_draft_layer_on_one_side_is_refused() -> None:
    rows = check_direct(rank_info(layout(draft_heads=2)), rank_info(layout()))
    by_field = {row.field: (row.local, row.remote) for row in rows}
    assert by_field["num_draft_layers"] == ("1", "absent")
    assert by_field["draft_kv_dtype"] == ("bfloat16", "absent")


def test_draft_head_count_must_agree() -> None:
    rows = check_direct(rank_info(layout(draft_heads=2)), rank_info(layout(draft_heads=4)))
    assert ("draft num_heads", "2", "4") in [(row.field, row.local, row.remote) for row in rows]


def test_private_draft_layers_do_not_show() -> None:
    private = KVCacheLayerSpec(
        layer_id=100,
        owner=KVCacheLayerOwner.DRAFT,
        dtype=ElementType.FLOAT16,
        num_kv_heads=2,
        head_dim=8,
        policy=ReusePolicy.PRIVATE,
    )
    specs = [target_layer(0, 2), private]
    info = rank_info(LayoutPlan.derive(specs, tokens_per_block=8), layers_per_stage=(1,))
    assert info.num_draft_layers is None
    assert {view.owner for view in info.page_table.views} == {"target"}
    alone = rank_info(
        LayoutPlan.derive([target_layer(0, 2)], tokens_per_block=8), layers_per_stage=(1,)
    )
    assert check_direct(info, alone) == ()


def test_state_layers_are_refused_with_the_reason() -> None:
    state = KVCacheLayerSpec(
        layer_id=1,
        owner=KVCacheLayerOwner.TARGET,
        dtype=ElementType.FLOAT32,
        num_kv_heads=0,
        head_dim=0,
        kv_factor=0,
        state_buffers=(
            BufferSpec(
                role=BufferRole.RECURRENT_STATE,
                dtype=ElementType.FLOAT32,
                num_heads=2,
                elements_per_head=16,
                mapping=PageMapping.HEAD_MAJOR,
            ),
        ),
    )
    plan = LayoutPlan.derive([target_layer(0, 2), state], tokens_per_block=8)
    info = rank_info(plan, layers_per_stage=(2,))
    assert [row.field for row in check_direct(info, info)] == ["page kind"]


def test_unequal_tensor_parallel_sizes_are_refused_with_both_numbers() -> None:
    whole = rank_info(
        LayoutPlan.derive([target_layer(0, 4), draft_layer(9, 4)], tokens_per_block=8),
        layers_per_stage=(1,),
    )
    half = rank_info(
        LayoutPlan.derive([target_layer(0, 2), draft_layer(9, 2)], tokens_per_block=8),
        shape=ParallelShape(tp_size=2, tp_rank=1),
        layers_per_stage=(1,),
    )
    rows = {row.field: (row.local, row.remote) for row in check_direct(whole, half)}
    assert rows["attention_tp_size"] == ("1", "2")


def staging(info: RankInfo) -> RankInfo:
    """The same rank with a memory that can stage."""
    return info.model_copy(update={"can_stage": True})


def paged(tokens_per_page: int, window: int | None = None) -> RankInfo:
    """A rank whose kernels read pages of this size."""
    specs = [
        replace(target_layer(layer, 2, window), tokens_per_page=tokens_per_page)
        for layer in range(2)
    ]
    return rank_info(LayoutPlan.derive(specs, tokens_per_block=8), layers_per_stage=(2,))


def test_other_page_sizes_are_accepted_where_both_memories_can_stage() -> None:
    small, large = paged(4), paged(8)
    assert check_direct(staging(small), staging(large)) == ()
    plan = TransferPlan.between(staging(small), staging(large))
    assert plan.stages
    assert not any(group.direct for group in plan.groups)


@pytest.mark.parametrize("who", ["ours", "theirs", "neither"])
def test_other_page_sizes_are_refused_where_a_memory_cannot_stage(who: str) -> None:
    small, large = paged(4), paged(8)
    ours = staging(small) if who == "ours" else small
    theirs = staging(large) if who == "theirs" else large
    rows = {row.field: row for row in check_direct(ours, theirs)}
    assert (rows["target tokens_per_page"].local, rows["target tokens_per_page"].remote) == (
        "4",
        "8",
    )
    assert "gathered and scattered" in rows["staging"].advice
    assert ("impossible" in rows["staging"].local) is (who != "ours")
    assert ("impossible" in rows["staging"].remote) is (who != "theirs")
    assert set(check_direct(theirs, ours)) == mirrored(tuple(rows.values()))


def test_padded_slots_and_windows_that_cover_everything_are_staged() -> None:
    wide = with_value(BASE, ("page_table", "groups", 0, "slot_bytes", 0), 8192)
    assert check_direct(staging(BASE), staging(wide)) == ()
    windowed, full = paged(8, window=24), paged(8)
    assert check_direct(staging(windowed), staging(full)) == ()
    assert [row.field for row in check_direct(windowed, full)] == ["target window", "staging"]


def test_equal_layouts_need_no_staging() -> None:
    assert check_direct(staging(BASE), BASE) == ()
    assert not TransferPlan.between(staging(BASE), BASE).stages


SINKS_OF_FULL = ("page_table", "groups", 0, "sink_blocks")


@given(path=st.sampled_from(LEAVES), step=st.integers(1, 40), data=st.data())
def test_staging_accepts_no_single_change_but_of_the_layout(
    path: tuple[str | int, ...], step: int, data: st.DataObject
) -> None:
    node: Json = BASE.model_dump()
    for key in path:
        node = node[key]
    value = node + step if isinstance(node, int) else node + data.draw(st.sampled_from("xyz"))
    try:
        other = with_value(BASE, path, value)
    except ValueError:
        return
    rows = check_direct(staging(BASE), staging(other))
    assert set(check_direct(staging(other), staging(BASE))) == mirrored(rows)
    if not rows:
        # Larger slots lie differently; without a window sinks say nothing.
        assert path[-2] == "slot_bytes" or path == SINKS_OF_FULL, (path, value)
        source, target = TransferPlan.between(staging(BASE), staging(other)), BASE.page_table
        assert {g.receiver.layer_group for g in source.groups} == {
            g.layer_group for g in target.groups
        }


def test_unequal_shapes_are_refused_whatever_can_stage() -> None:
    half = rank_info(
        LayoutPlan.derive([target_layer(0, 1)], tokens_per_block=8),
        shape=ParallelShape(tp_size=2, tp_rank=0),
        layers_per_stage=(1,),
    )
    whole = rank_info(
        LayoutPlan.derive([target_layer(0, 2)], tokens_per_block=8), layers_per_stage=(1,)
    )
    fields = {row.field for row in check_direct(staging(half), staging(whole))}
    assert {"attention_tp_size", "target num_heads"} <= fields
