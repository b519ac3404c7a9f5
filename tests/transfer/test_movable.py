"""What sessions cannot move is refused: one row a field, both values, the same from either side."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import (
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
)
from tests.support.transfers import layout, rank_info, target_layer
from tests.transfer.changed import Json, leaves, with_value
from tests.transfer.geometries import Attention, Recurrent, Side, geometry, same_model
from transfer.compatibility import check_peer
from transfer.incompatibility import Incompatibility
from transfer.movable import check_movable
from transfer.plan import TransferPlan
from transfer.rank_info import RankInfo

BASE = rank_info()
LEAVES = list(leaves(BASE.model_dump()))
LAYERS = (Attention(4), Attention(4, window=17))
WHOLE = Side(stages=(2,))


def mirrored(rows: tuple[Incompatibility, ...]) -> set[Incompatibility]:
    return {Incompatibility(row.field, row.remote, row.local, row.advice) for row in rows}


def staging(info: RankInfo) -> RankInfo:
    """The same rank with a memory that can stage."""
    return info.model_copy(update={"can_stage": True})


def by_field(local: RankInfo, remote: RankInfo) -> dict[str, tuple[str, str]]:
    """Rows of a pair, no field twice, the same from either side."""
    rows = check_movable(local, remote)
    assert set(check_movable(remote, local)) == mirrored(rows)
    assert len({row.field for row in rows}) == len(rows)
    return {row.field: (row.local, row.remote) for row in rows}


def all_direct(local: RankInfo, remote: RankInfo) -> bool:
    """Whether nothing has to be staged, whichever of the two sends."""
    plans = TransferPlan.between(local, remote), TransferPlan.between(remote, local)
    return all(group.direct for plan in plans for group in plan.groups)


@settings(deadline=None)
@given(
    path=st.sampled_from(LEAVES),
    step=st.integers(1, 40),
    memories=st.sampled_from(["both stage", "none stages"]),
    data=st.data(),
)
def test_any_single_change_is_refused_if_no_plan_maps_it_or_it_cannot_be_staged(
    path: tuple[str | int, ...], step: int, memories: str, data: st.DataObject
) -> None:
    node: Json = BASE.model_dump()
    for key in path:
        node = node[key]
    value = node + step if isinstance(node, int) else node + data.draw(st.sampled_from("xyz"))
    try:
        other = with_value(BASE, path, value)
    except ValueError:
        return
    can_stage = memories == "both stage"
    local, remote = (staging(BASE), staging(other)) if can_stage else (BASE, other)
    fields = by_field(local, remote)
    unmapped = check_peer(local, remote)
    if unmapped:
        assert set(fields) == {row.field for row in unmapped}
    else:
        assert bool(fields) is not (can_stage or all_direct(local, remote))
        assert not fields or "staging" in fields


@settings(max_examples=50, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_ranks_of_any_two_instances_are_refused_for_what_they_cannot_do(random: Random) -> None:
    pair = geometry(random)
    sender = random.choice(pair.senders(0))
    receiver = random.choice(pair.receivers(0))
    unmapped = check_peer(sender, receiver)
    assert set(by_field(staging(sender), staging(receiver))) == {row.field for row in unmapped}
    if not unmapped:
        fields = by_field(sender, receiver)
        assert bool(fields) is not all_direct(sender, receiver)
        for ours, theirs in fields.values():
            assert ours != theirs or ours == "impossible with this memory"


def test_all_reasons_come_at_once() -> None:
    other = with_value(with_value(BASE, ("tokens_per_block",), 16), ("engine", "model"), "other")
    rows = check_movable(BASE, other)
    assert {"tokens_per_block", "model"} <= {row.field for row in rows}
    assert "ours is 8, the peer's is 16" in "\n".join(str(row) for row in rows)


def test_equal_facts_pair_whatever_the_process() -> None:
    other = rank_info(name="b").model_copy(
        update={"rank": 3, "data_host": "10.0.0.2", "data_port": 9}
    )
    assert check_movable(BASE, other) == ()
    groups = tuple(
        group.model_copy(update={"pool_group": group.pool_group + 5})
        for group in BASE.page_table.groups
    )
    table = BASE.page_table.model_copy(update={"groups": groups})
    assert check_movable(BASE, BASE.model_copy(update={"page_table": table})) == ()


SHAPES = [
    pytest.param(replace(WHOLE, tp=2), WHOLE, "target num_heads", ("2", "4"), id="tp 2->1"),
    pytest.param(WHOLE, replace(WHOLE, tp=4), "target num_heads", ("4", "1"), id="tp 1->4"),
    pytest.param(
        WHOLE, replace(WHOLE, page_tokens=4), "target tokens_per_page", ("8", "4"), id="pages"
    ),
]


@pytest.mark.parametrize(("sender", "receiver", "field", "values"), SHAPES)
def test_layouts_that_differ_take_two_memories_that_can_stage(
    sender: Side, receiver: Side, field: str, values: tuple[str, str]
) -> None:
    pair = same_model(sender, receiver, LAYERS)
    source, target = pair.senders(0)[0], pair.receivers(0)[0]
    assert not by_field(staging(source), staging(target))
    fields = by_field(source, target)
    assert fields[field] == values
    assert fields["staging"] == ("impossible with this memory",) * 2
    assert by_field(staging(source), target)["staging"] == (
        "possible",
        "impossible with this memory",
    )
    (advice,) = {row.advice for row in check_movable(source, target) if row.field == "staging"}
    assert "gathered and scattered" in advice


def test_values_of_several_buffers_are_in_one_order_on_both_sides() -> None:
    """Two layer groups that differ crosswise do not look equal."""

    def smaller_pages(number: int) -> RankInfo:
        views = list(BASE.page_table.views)
        half = {"tokens_per_page": 4, "pages_per_block": 2}
        half |= {"page_bytes": 256, "page_stride_bytes": 256}
        views[number] = views[number].model_copy(update=half)
        table = BASE.page_table.model_copy(update={"views": tuple(views)})
        return BASE.model_copy(update={"page_table": table})

    fields = by_field(smaller_pages(0), smaller_pages(2))
    assert fields["target tokens_per_page"] == ("4 / 8", "8 / 4")


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        pytest.param(WHOLE, replace(WHOLE, cp=2), id="cp 1->2"),
        pytest.param(replace(WHOLE, tp=2, dp=2), WHOLE, id="dp"),
        pytest.param(replace(WHOLE, drafts=True), WHOLE, id="drafts of the sender alone"),
    ],
)
def test_whole_slots_need_no_staging(sender: Side, receiver: Side) -> None:
    # A window and full attention share no slots, so that draft layers have slots of their own.
    drafts = (Attention(4, window=9, policy=ReusePolicy.OPTIONAL),)
    pair = same_model(sender, receiver, LAYERS, drafts)
    for source in pair.senders(0):
        for target in pair.receivers(0):
            assert not by_field(source, target)


def test_states_are_moved() -> None:
    pair = same_model(WHOLE, WHOLE, (Attention(2), Recurrent(2)))
    (source,), (target,) = pair.senders(0), pair.receivers(0)
    assert not by_field(source, target)


def test_slots_that_differ_in_places_alone_are_shown() -> None:
    wide = with_value(BASE, ("page_table", "groups", 0, "slot_bytes", 0), 8192)
    assert not by_field(staging(BASE), staging(wide))
    fields = by_field(BASE, wide)
    assert set(fields) == {"slot layout", "staging"}
    assert "of (8192, " in fields["slot layout"][1]


def test_a_window_that_covers_everything_is_none() -> None:
    specs = [target_layer(layer, 2, 24) for layer in range(2)]
    windowed = rank_info(LayoutPlan.derive(specs, tokens_per_block=8), layers_per_stage=(2,))
    full = rank_info(
        LayoutPlan.derive(specs, tokens_per_block=8, max_sequence_tokens=24), layers_per_stage=(2,)
    )
    assert {group.window for group in full.page_table.groups} == {None}
    assert not by_field(windowed, full)


def test_draft_head_count_must_agree() -> None:
    fields = by_field(rank_info(layout(draft_heads=2)), rank_info(layout(draft_heads=4)))
    assert fields["draft total_heads"] == ("2", "4")


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
    assert check_movable(info, alone) == ()
