"""Every byte of the receiver is written exactly once, by the bytes of the same layer and head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from tests.support.transfers import draft_layer, layout, rank_info, target_layer
from transfer.page_table import first_head
from transfer.plan import Fragment, TransferPlan, merge_fragments
from transfer.rank_info import PageView, ParallelShape, RankInfo

Slot = dict[tuple[int, int], npt.NDArray[np.int64]]


def marked_slot(info: RankInfo) -> Slot:
    """One slot of each (layer group, pool): each data byte tells its layer, role, head, place."""
    slot = {
        (group.layer_group, pool): np.full(size, -1, dtype=np.int64)
        for group in info.page_table.groups
        for pool, size in enumerate(group.slot_bytes)
    }
    for view in info.page_table.views:
        head_bytes = view.page_bytes // view.num_heads
        for buffer in view.buffers:
            for page in range(view.pages_per_block):
                for head in range(view.num_heads):
                    start = buffer.offset_bytes + page * view.page_stride_bytes + head * head_bytes
                    slot[view.layer_group, view.pool][start : start + head_bytes] = [
                        hash((buffer.layer_id, buffer.role, view.first_head + head, page, byte))
                        & 0x7FFF_FFFF
                        for byte in range(head_bytes)
                    ]
    return slot


def carry(senders: list[RankInfo], receiver: RankInfo) -> tuple[Slot, Slot]:
    """What all plans together write into a slot of the receiver, and how often each byte."""
    written = {place: np.full_like(data, -1) for place, data in marked_slot(receiver).items()}
    times = {place: np.zeros_like(data) for place, data in written.items()}
    for sender in senders:
        source = marked_slot(sender)
        for group in TransferPlan.between(sender, receiver).groups:
            for piece in group.fragments:
                origin = source[group.sender.layer_group, piece.sender_pool]
                place = group.receiver.layer_group, piece.receiver_pool
                start, end = (
                    piece.receiver_offset_bytes,
                    piece.receiver_offset_bytes + piece.size_bytes,
                )
                written[place][start:end] = origin[
                    piece.sender_offset_bytes : piece.sender_offset_bytes + piece.size_bytes
                ]
                times[place][start:end] += 1
    return written, times


def instance(
    layers: list[tuple[int, int, str]], tp: int, stages: tuple[int, ...], page: int | None
) -> list[RankInfo]:
    """All ranks of an instance; layers are (id, kv heads in all, owner), target ones first."""
    targets = [entry for entry in layers if entry[2] == "target"]
    ranks = []
    start = 0
    for pp_rank, count in enumerate(stages):
        stage = targets[start : start + count]
        start += count
        if pp_rank == len(stages) - 1:
            stage = stage + [entry for entry in layers if entry[2] == "draft"]
        for tp_rank in range(tp):
            specs = [
                KVCacheLayerSpec(
                    layer_id=layer,
                    owner=KVCacheLayerOwner(owner),
                    dtype=ElementType.FLOAT16,
                    num_kv_heads=max(1, heads // tp),
                    head_dim=4,
                    window=16 if layer % 3 == 1 else None,
                    tokens_per_page=page,
                )
                for layer, heads, owner in stage
            ]
            shape = ParallelShape(tp_size=tp, tp_rank=tp_rank, pp_size=len(stages), pp_rank=pp_rank)
            ranks.append(
                rank_info(
                    LayoutPlan.derive(specs, tokens_per_block=8),
                    shape=shape,
                    total_heads={layer: heads for layer, heads, _ in layers},
                    layers_per_stage=stages,
                )
            )
    return ranks


SIZES = st.sampled_from([1, 2, 4])


@given(
    heads=SIZES,
    draft_heads=st.sampled_from([0, 1, 2, 4]),
    sender_tp=SIZES,
    receiver_tp=SIZES,
    sender_stages=st.sampled_from([(4,), (2, 2), (1, 3)]),
    receiver_stages=st.sampled_from([(4,), (2, 2), (3, 1)]),
    page=st.sampled_from([None, 4]),
)
def test_every_destination_byte_is_written_exactly_once(
    heads: int,
    draft_heads: int,
    sender_tp: int,
    receiver_tp: int,
    sender_stages: tuple[int, ...],
    receiver_stages: tuple[int, ...],
    page: int | None,
) -> None:
    layers = [(layer, heads, "target") for layer in range(4)]
    if draft_heads:
        layers.append((9, draft_heads, "draft"))
    senders = instance(layers, sender_tp, sender_stages, page)
    for receiver in instance(layers, receiver_tp, receiver_stages, page):
        written, times = carry(senders, receiver)
        for place, expected in marked_slot(receiver).items():
            data = expected >= 0
            assert data.any()
            assert np.array_equal(written[place][data], expected[data])
            assert (times[place][data] == 1).all()
            assert (times[place][~data] <= 1).all()


def test_equal_ranks_move_whole_slots() -> None:
    info = rank_info(layout(draft_heads=2))
    plan = TransferPlan.between(info, info)
    assert [group.sender.layer_group for group in plan.groups] == [0, 1]
    assert all(group.direct for group in plan.groups)
    for group in plan.groups:
        assert group.block_bytes == group.sender.block_bytes == group.receiver.block_bytes


def test_heads_split_over_two_ranks_are_not_direct() -> None:
    whole = instance([(0, 4, "target")], 1, (1,), None)[0]
    for half in instance([(0, 4, "target")], 2, (1,), None):
        (group,) = TransferPlan.between(half, whole).groups
        assert not group.direct
        assert group.block_bytes * 2 == group.receiver.block_bytes


def test_one_of_several_ranks_with_the_same_head_is_elected() -> None:
    senders = instance([(0, 1, "target")], 4, (1,), None)
    for receiver in instance([(0, 1, "target")], 2, (1,), None):
        sending = [info for info in senders if TransferPlan.between(info, receiver).groups]
        assert len(sending) == 1


def test_draft_and_target_heads_split_on_their_own() -> None:
    specs = [target_layer(0, 1), draft_layer(9, 4)]
    shape = ParallelShape(tp_size=2, tp_rank=1)
    plan = LayoutPlan.derive(specs, tokens_per_block=8)
    info = rank_info(plan, shape=shape, total_heads={0: 1, 9: 8}, layers_per_stage=(1,))
    views: dict[str, PageView] = {view.owner: view for view in info.page_table.views}
    assert (views["target"].first_head, views["target"].total_heads) == (0, 1)
    assert (views["draft"].first_head, views["draft"].total_heads) == (4, 8)


def test_heads_that_do_not_spread_are_refused() -> None:
    with pytest.raises(ValueError, match="6 kv heads do not spread over 4 ranks"):
        first_head(ParallelShape(tp_size=4), 2, 6)


def test_merging_joins_only_what_touches_on_both_ends() -> None:
    pieces = [Fragment(0, 8, 0, 8, 8), Fragment(0, 0, 0, 0, 8), Fragment(0, 24, 0, 16, 8)]
    assert list(merge_fragments(pieces)) == [Fragment(0, 0, 0, 0, 16), Fragment(0, 24, 0, 16, 8)]
