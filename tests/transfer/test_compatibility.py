"""What no plan maps is refused: one row a field, both values, the same from either side."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec, ReusePolicy
from tests.support.transfers import draft_layer, layout, rank_info, target_layer
from tests.transfer.changed import Json, Path, leaves, with_value
from tests.transfer.geometries import Attention, Layer, Recurrent, Side, same_model
from transfer.compatibility import check_peer, require_peer
from transfer.incompatibility import Incompatibility, PeerIncompatible
from transfer.plan import TransferPlan
from transfer.rank_info import RankInfo

BASE = rank_info()
SPARSE = Attention(4, index_keys=True)
WINDOW = Attention(4, window=17, sink_tokens=3)
STATES = Recurrent(4)
MIXED = (Attention(4), SPARSE, WINDOW, STATES)
DRAFTS = (Attention(4, policy=ReusePolicy.OPTIONAL),)
SIDE = Side(stages=(4,), drafts=True)
LAST = " of layers [3]"


def mirrored(rows: tuple[Incompatibility, ...]) -> set[Incompatibility]:
    return {Incompatibility(row.field, row.remote, row.local, row.advice) for row in rows}


def rows_of(local: RankInfo, remote: RankInfo) -> dict[str, tuple[str, str]]:
    """Values by field, once both sides agree."""
    rows = check_peer(local, remote)
    assert set(check_peer(remote, local)) == mirrored(rows)
    assert len({row.field for row in rows}) == len(rows)
    assert all(row.local in str(row) and row.remote in str(row) and row.advice for row in rows)
    return {row.field: (row.local, row.remote) for row in rows}


def first(side: Side, layers: tuple[Layer, ...] = MIXED) -> RankInfo:
    """Rank 0 of an instance."""
    return same_model(side, side, layers, DRAFTS).senders(0)[0]


@pytest.mark.parametrize(
    ("field", "path", "value"),
    [
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
        ("target element", ("page_table", "views", 0, "element"), "bfloat16"),
    ],
)
def test_a_changed_fact_gives_its_row(field: str, path: Path, value: object) -> None:
    rows = rows_of(BASE, with_value(BASE, path, value))
    assert field in rows
    assert rows[field][0] != rows[field][1]


@pytest.mark.parametrize(
    ("index", "layer", "rows"),
    [
        (0, replace(MIXED[0], heads=8), {"target total_heads": ("4", "8")}),
        (0, Attention(4, head_dim=6), {"target elements_per_head": ("4", "6")}),
        (
            0,
            Attention(4, dtype=ElementType.FLOAT8_E4M3),
            {"target element": ("float16", "float8_e4m3"), "target element_bits": ("16", "8")},
        ),
        (0, SPARSE, {"target buffers": ("nothing more", "index_key of layers [0]")}),
        (2, replace(WINDOW, window=18), {"target window": ("17", "18")}),
        (2, replace(WINDOW, sink_tokens=9), {"target sink_blocks": ("1", "2")}),
        (3, replace(STATES, units=(1, 3)), {"target sections": ("[8, 8]", "[4, 12]")}),
        (
            3,
            Attention(4),
            {"target buffers": ("conv_state+recurrent_state" + LAST, "key+value" + LAST)},
        ),
    ],
    ids=["heads", "head_dim", "dtype", "roles", "window", "sinks", "sections", "kind"],
)
def test_a_layer_of_other_pages_gives_its_rows(
    index: int, layer: Layer, rows: dict[str, tuple[str, str]]
) -> None:
    other: tuple[Layer, ...] = (*MIXED[:index], layer, *MIXED[index + 1 :])
    assert rows_of(first(SIDE), first(SIDE, other)) == rows


def test_mappings_and_kinds_are_compared() -> None:
    replicated = with_value(BASE, ("page_table", "views", 0, "mapping"), "replicated")
    assert rows_of(BASE, replicated) == {"target mapping": ("head_major", "replicated")}


@pytest.mark.parametrize(("ours", "theirs", "fits"), [(1, 4, True), (3, 3, True), (2, 4, False)])
def test_context_parallel_sizes_are_equal_or_one_of_them_is_one(
    ours: int,
    theirs: int,
    fits: bool,  # noqa: FBT001  (a column of the table)
) -> None:
    rows = rows_of(first(replace(SIDE, cp=ours)), first(replace(SIDE, cp=theirs)))
    assert rows == ({} if fits else {"cp_size": (str(ours), str(theirs))})


def test_sections_are_not_cut_within_a_byte() -> None:
    layers: tuple[Layer, ...] = (Recurrent(2, units=(1, 3), dtype=ElementType.PACKED4),)
    whole, halves = Side(), Side(tp=2)
    rows = rows_of(first(whole, layers), first(halves, layers))
    assert rows == {
        "target section cut": (
            "shard 0 of 1, sections [2, 6] of packed4",
            "shard 0 of 2, sections [1, 3] of packed4",
        )
    }
    assert rows_of(first(halves, layers), first(halves, layers)) == {}
    even: tuple[Layer, ...] = (Recurrent(2, units=(2, 4), dtype=ElementType.PACKED4),)
    assert rows_of(first(whole, even), first(halves, even)) == {}


@pytest.mark.parametrize(
    "other",
    [
        replace(SIDE, tp=4),
        replace(SIDE, tp=4, dp=2),
        replace(SIDE, stages=(1, 1, 2)),
        replace(SIDE, page_tokens=2, draft_page_tokens=4),
        replace(SIDE, own_draft_pools=True),
        replace(SIDE, longest_tokens=17),
        replace(SIDE, drafts=False),
    ],
    ids=["tp", "dp", "pp", "kernel pages", "draft pools", "longest sequence", "drafting alone"],
)
def test_what_is_merely_different_is_accepted(other: Side) -> None:
    pair = same_model(SIDE, other, MIXED, DRAFTS)
    (local,) = pair.senders(0)
    for remote in pair.receivers(0):
        assert rows_of(local, remote) == {}
        require_peer(local, remote)


def test_draft_layers_must_be_the_same_where_both_have_them() -> None:
    other = replace(DRAFTS[0], heads=8, dtype=ElementType.BFLOAT16)
    pair = same_model(SIDE, SIDE, MIXED, DRAFTS)
    ours, theirs = pair.senders(0)[0], replace(pair, receiver_drafts=(other,)).receivers(0)[0]
    assert rows_of(ours, theirs) == {
        "draft_kv_dtype": ("float16", "bfloat16"),
        "draft element": ("float16", "bfloat16"),
        "draft total_heads": ("4", "8"),
    }
    first_number, other_number = (
        rank_info(
            LayoutPlan.derive([target_layer(0, 2), draft_layer(layer, 2)], tokens_per_block=8),
            layers_per_stage=(1,),
        )
        for layer in (7, 8)
    )
    assert list(rows_of(first_number, other_number)) == ["draft buffers"]


def test_private_draft_layers_do_not_show() -> None:
    private = KVCacheLayerSpec(
        layer_id=100,
        owner=KVCacheLayerOwner.DRAFT,
        dtype=ElementType.FLOAT16,
        num_kv_heads=2,
        head_dim=8,
        policy=ReusePolicy.PRIVATE,
    )
    info = rank_info(
        LayoutPlan.derive([target_layer(0, 2), private], tokens_per_block=8), layers_per_stage=(1,)
    )
    assert info.num_draft_layers is None
    assert {view.owner for view in info.page_table.views} == {"target"}


def test_all_reasons_come_at_once() -> None:
    other = with_value(with_value(BASE, ("tokens_per_block",), 16), ("engine", "model"), "other")
    with pytest.raises(PeerIncompatible) as caught:
        require_peer(BASE, other)
    assert {"tokens_per_block", "model"} <= {row.field for row in caught.value.rows}
    assert "ours is 8, the peer's is 16" in str(caught.value)


VIEW = ("page_table", "views", 0)
GROUP = ("page_table", "groups", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ((*VIEW, "tokens_per_page"), 4, "1 pages of 4 tokens hold no block of 8"),
        ((*VIEW, "pages_per_block"), 2, "2 pages of 8 tokens hold no block of 8"),
        ((*VIEW, "page_bytes"), 520, "520 bytes are no 8 rows of 2 heads"),
        ((*VIEW, "elements_per_head"), 7, "512 bytes do not hold 112 elements"),
        ((*VIEW, "page_stride_bytes"), 256, "pages of 512 bytes are 256 bytes apart"),
        ((*VIEW, "mapping"), "diagonal", "unknown mapping diagonal"),
        ((*VIEW, "mapping"), "sectioned", r"sections \[\] do not add up to 32 elements"),
        ((*VIEW, "sections"), (32,), r"sections \[32\] do not add up to 0 elements"),
        ((*VIEW, "buffers", 0, "size_bytes"), 64, "64 bytes at 0 are no 512 bytes within"),
        ((*VIEW, "buffers", 0, "offset_bytes"), 1 << 30, "are no 512 bytes within a slot of"),
        ((*VIEW, "buffers", 0, "offset_bytes"), 512, "buffers at 512 and 512 overlap"),
        ((*VIEW, "buffers", 0, "role"), "value", "layer 0 has two value buffers"),
        ((*VIEW, "buffers", 0, "layer_id"), 9, "target layer 9 is not in the rank's stage"),
        ((*VIEW, "total_heads"), 3, "3 heads do not spread over 1 ranks by 2"),
        ((*VIEW, "total_heads"), 4, "4 heads do not spread over 1 ranks by 2"),
        ((*VIEW, "first_head"), 2, r"rank 0 of 1 does not hold heads 2\+2 of 2"),
        ((*GROUP, "kind"), "cross", "layer group 0 is of unknown kind cross"),
        ((*GROUP, "kind"), "state", "1 pages of 8 tokens hold no block of 0"),
        ((*GROUP, "window"), 0, "layer group 0 has a window of 0 tokens"),
        ((*GROUP, "slot_bytes", 0), 64, "within a slot of 64"),
        (("page_table", "views", 1, "buffers", 0, "layer_id"), 2, "the number of a target layer"),
    ],
)
def test_a_rank_that_contradicts_itself_is_refused(path: Path, value: object, said: str) -> None:
    rows = rows_of(BASE, with_value(BASE, path, value))
    assert rows["page table"][0] == "consistent"
    assert re.search(said, rows["page table"][1])


LEAVES = list(leaves(first(replace(SIDE, tp=2)).model_dump()))


@settings(deadline=None)
@given(path=st.sampled_from(LEAVES), step=st.integers(-40, 40), data=st.data())
def test_copies_of_any_accepted_pair_stay_within_slots(
    path: Path, step: int, data: st.DataObject
) -> None:
    local = first(SIDE)
    base = first(replace(SIDE, tp=2))
    node: Json = base.model_dump()
    for key in path:
        node = node[key]
    value = node + step if isinstance(node, int) else node + data.draw(st.sampled_from("xyz"))
    try:
        remote = with_value(base, path, value)
    except ValueError:
        return
    if rows_of(local, remote):
        return
    for group in TransferPlan.between(local, remote).groups:
        for piece in group.fragments:
            sender_end = piece.sender_offset_bytes + piece.size_bytes
            receiver_end = piece.receiver_offset_bytes + piece.size_bytes
            assert sender_end <= group.sender.slot_bytes[piece.sender_pool]
            assert receiver_end <= group.receiver.slot_bytes[piece.receiver_pool]


def test_equal_facts_pair_whatever_the_process() -> None:
    other = rank_info(name="b").model_copy(update={"rank": 3, "data_host": "x", "data_port": 9})
    assert rows_of(BASE, other) == {}
    assert rows_of(BASE, rank_info(layout(draft_heads=0))) == {}
