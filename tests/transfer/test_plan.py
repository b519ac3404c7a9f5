"""Who sends what to whom, and where slots stay whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole, ElementType, ReusePolicy
from tests.support.transfers import draft_layer, layout, rank_info, target_layer
from tests.transfer.geometries import Attention, Recurrent, Side, same_model
from transfer.page_runs import PageRun, page_runs
from transfer.page_table import DraftShift, append_drafts, first_head, page_table_of
from transfer.peers import receivers_from, senders_to
from transfer.plan import Fragment, TransferPlan, merge_fragments
from transfer.rank_info import PageView, ParallelShape, RankInfo

DENSE = (Attention(8), Attention(8))
DRAFT = (Attention(8, head_dim=6, policy=ReusePolicy.OPTIONAL),)
ONE = Side(stages=(2,))


def fragments(sender: RankInfo, receiver: RankInfo) -> list[Fragment]:
    """All fragments of a pair with one group."""
    (group,) = TransferPlan.between(sender, receiver).groups
    return list(group.fragments)


def whole(side: Side, layers: tuple[Attention | Recurrent, ...] = DENSE) -> list[RankInfo]:
    """All ranks of an instance without drafts."""
    pair = same_model(side, side, layers)
    return [info for dp_rank in range(side.dp) for info in pair.senders(dp_rank)]


def test_equal_ranks_move_whole_slots() -> None:
    info = rank_info(layout(draft_heads=2))
    plan = TransferPlan.between(info, info)
    assert [group.sender.layer_group for group in plan.groups] == [0, 1]
    assert all(group.direct for group in plan.groups)
    for group in plan.groups:
        assert group.block_bytes == group.sender.block_bytes == group.receiver.block_bytes


def test_staged_messages_are_as_large_as_suits_both() -> None:
    host = rank_info(layout()).model_copy(update={"can_stage": True})
    device = host.model_copy(update={"staging_message_bytes": 32 << 20})
    assert TransferPlan.between(device, device).message_bytes == 32 << 20
    for pair in ((host, device), (device, host)):
        plan = TransferPlan.between(*pair)
        assert (plan.stages, plan.message_bytes) == (True, host.staging_message_bytes)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 3])
def test_every_rank_sends_whole_slots_to_its_like(heads: int, cp: int) -> None:
    layers = (Attention(heads, index_keys=True), Attention(1, kv_factor=1), Recurrent(heads))
    pair = same_model(Side(tp=4, stages=(3,)), Side(tp=8, dp=2, stages=(3,), cp=cp), layers)
    for receiver in pair.receivers(1):
        (sender,) = senders_to(receiver, pair.senders(0), 0)
        assert sender.shape.tp_rank == receiver.shape.attention_tp_rank
        plan = TransferPlan.between(sender, receiver)
        assert len(plan.groups) == 2
        assert all(group.direct for group in plan.groups)


def test_heads_split_over_two_ranks_are_not_direct() -> None:
    (receiver,) = whole(ONE)
    for half in whole(replace(ONE, tp=2)):
        (group,) = TransferPlan.between(half, receiver).groups
        assert not group.direct
        assert group.block_bytes * 2 == group.receiver.block_bytes


def test_layers_of_a_stage_touch_and_move_as_one_run() -> None:
    (receiver,) = whole(ONE)
    for stage in whole(replace(ONE, stages=(1, 1))):
        assert len(fragments(stage, receiver)) == 1


def test_smaller_kernel_pages_are_cut_to_common_runs() -> None:
    keys = (Attention(8, kv_factor=1),)
    (sender,) = whole(Side(), keys)
    (receiver,) = whole(Side(page_tokens=2), keys)
    # Eight heads, four pages of two tokens.
    assert [piece.size_bytes for piece in fragments(sender, receiver)] == [2 * 4 * 2] * 8 * 4


def test_pages_that_divide_neither_way_meet_in_their_common_divisor() -> None:
    keys = (Attention(2, kv_factor=1),)
    pair = same_model(Side(page_tokens=6), Side(page_tokens=4), keys, tokens_per_block=12)
    sizes = Counter(
        piece.size_bytes for piece in fragments(pair.senders(0)[0], pair.receivers(0)[0])
    )
    # Of twelve tokens 0-3, 4-5, 6-7 and 8-11 of either head lie together on both ends.
    row_bytes = 4 * 2
    assert sizes == {4 * row_bytes: 2 * 2, 2 * row_bytes: 2 * 2}


def test_holders_of_one_head_share_the_receivers() -> None:
    senders = whole(Side(tp=4, stages=(1,)), (Attention(1),))
    for side, work in (
        (Side(tp=4, stages=(1,)), [1, 1, 1, 1]),
        (Side(tp=4, dp=4, stages=(1,)), [1, 1, 1, 1]),
        (Side(tp=8, stages=(1,)), [2, 2, 2, 2]),
        (Side(cp=4, stages=(1,)), [1, 1, 1, 1]),
        (Side(tp=2, stages=(1,)), [1, 0, 1, 0]),
    ):
        receivers = whole(side, (Attention(1),))
        assert [
            sum(bool(TransferPlan.between(sender, receiver).groups) for receiver in receivers)
            for sender in senders
        ] == work


def test_a_receiver_talks_to_the_ranks_that_hold_its_heads_and_layers() -> None:
    pair = same_model(Side(tp=4, stages=(1, 1)), Side(tp=2, stages=(1, 1), cp=2), DENSE)
    receivers = pair.receivers(0)
    for receiver in receivers:
        places = {
            (info.shape.pp_rank, info.shape.tp_rank)
            for info in senders_to(receiver, pair.senders(0), 0)
        }
        first = 2 * receiver.shape.tp_rank
        assert places == {(receiver.shape.pp_rank, first), (receiver.shape.pp_rank, first + 1)}


def test_both_ends_agree_on_who_waits_for_whom() -> None:
    pair = same_model(
        Side(tp=4, dp=2, stages=(1, 2)),
        Side(tp=4, stages=(2, 1), cp=2),
        (Attention(2), Attention(1, index_keys=True), Recurrent(4)),
    )
    senders = [info for dp_rank in (0, 1) for info in pair.senders(dp_rank)]
    receivers = pair.receivers(0)
    for dp_rank in (0, 1):
        awaited = {
            (sender.rank, receiver.rank)
            for receiver in receivers
            for sender in senders_to(receiver, senders, dp_rank)
        }
        sent = {
            (sender.rank, receiver.rank)
            for sender in senders
            if sender.shape.dp_rank == dp_rank
            for receiver in receivers_from(sender, receivers, 0)
        }
        assert awaited == sent
        assert {receiver for _, receiver in awaited} == set(range(len(receivers)))


def test_a_missing_rank_is_not_taken_for_one_without_pages() -> None:
    pair = same_model(Side(tp=2, stages=(2,)), ONE, DENSE)
    (receiver,) = pair.receivers(0)
    for ranks, held in ((pair.senders(0)[:1], "1 of 2"), ([], "0 of 0")):
        with pytest.raises(ValueError, match=f"dp group 0 has {held} ranks"):
            senders_to(receiver, ranks, 0)


def test_equal_context_parallel_ranks_pair_one_to_one() -> None:
    side = Side(tp=2, dp=2, stages=(1, 1), cp=3)
    pair = same_model(side, side, (Recurrent(2), Recurrent(2)))
    for receiver in pair.receivers(1):
        (sender,) = senders_to(receiver, pair.senders(0), 0)
        assert sender.shape.cp_rank == receiver.shape.cp_rank
        assert sender.shape.pp_rank == receiver.shape.pp_rank


def test_who_drafts_alone_is_told() -> None:
    drafting, plain = replace(ONE, drafts=True), ONE
    (with_drafts,) = same_model(drafting, plain, DENSE, DRAFT).senders(0)
    (without,) = same_model(drafting, plain, DENSE, DRAFT).receivers(0)
    both = TransferPlan.between(with_drafts, with_drafts)
    assert (both.receiver_only_drafts, both.sender_only_drafts) == ((), ())
    assert len(both.groups) == 2
    alone = TransferPlan.between(without, with_drafts)
    assert (alone.receiver_only_drafts, alone.sender_only_drafts) == ((2,), ())
    assert len(alone.groups) == 1
    given = TransferPlan.between(with_drafts, without)
    assert (given.receiver_only_drafts, given.sender_only_drafts) == ((), (2,))
    assert len(given.groups) == 1


def test_a_stage_without_draft_layers_does_not_draft_alone() -> None:
    drafting = replace(ONE, stages=(1, 1), drafts=True)
    first, last = same_model(drafting, drafting, DENSE, DRAFT).senders(0)
    assert TransferPlan.between(first, last).receiver_only_drafts == ()


def test_a_drafter_with_pools_of_its_own_pairs_with_a_unified_one() -> None:
    unified = replace(ONE, drafts=True)
    drafts = (Attention(4),)
    pair = same_model(unified, replace(unified, own_draft_pools=True), DENSE, drafts)
    ((sender,), (receiver,)) = pair.senders(0), pair.receivers(0)
    assert len(sender.page_table.groups) == 1
    plan = TransferPlan.between(sender, receiver)
    assert [
        (group.sender.layer_group, group.receiver.layer_group, group.receiver.pool_group)
        for group in plan.groups
    ] == [(0, 0, 0), (0, 1, 1)]
    assert sum(group.block_bytes for group in plan.groups) == sum(
        sender.page_table.groups[0].slot_bytes
    )


def test_appended_drafts_are_numbered_behind_private_groups_too() -> None:
    private = replace(draft_layer(8, 2), policy=ReusePolicy.PRIVATE)
    plan = LayoutPlan.derive([target_layer(0, 2), private], tokens_per_block=8)
    drafts = page_table_of(
        LayoutPlan.derive([draft_layer(9, 2)], tokens_per_block=8), ParallelShape()
    )
    table = append_drafts(page_table_of(plan, ParallelShape()), drafts, DraftShift.behind(plan))
    assert [group.layer_group for group in table.groups] == [0, 2]
    assert table.draft_layers == (9,)
    assert table.views[-1].layer_group == 2


def test_draft_and_target_heads_split_on_their_own() -> None:
    plan = LayoutPlan.derive([target_layer(0, 1), draft_layer(9, 4)], tokens_per_block=8)
    shape = ParallelShape(tp_size=2, tp_rank=1)
    totals = {(0, BufferRole.KEY): 1, (0, BufferRole.VALUE): 1}
    info = rank_info(plan, shape=shape, total_heads=totals, layers_per_stage=(1,))
    views: dict[str, PageView] = {view.owner: view for view in info.page_table.views}
    assert (views["target"].first_head, views["target"].total_heads) == (0, 1)
    assert (views["draft"].first_head, views["draft"].total_heads) == (4, 8)


def test_layers_of_one_geometry_and_other_head_counts_are_views_of_their_own() -> None:
    info = whole(Side(tp=4, stages=(2,)), (Attention(4), Attention(1, index_keys=True)))[3]
    heads = {
        buffer.layer_id: (view.first_head, view.total_heads)
        for view in info.page_table.views
        for buffer in view.buffers
        if buffer.role == "key"
    }
    assert heads == {0: (3, 4), 1: (0, 1)}
    index = [view for view in info.page_table.views if view.mapping == "replicated"]
    assert [(view.first_head, view.total_heads) for view in index] == [(0, 1)]


def test_heads_that_do_not_spread_are_refused() -> None:
    with pytest.raises(ValueError, match="6 kv heads do not spread over 4 ranks"):
        first_head(ParallelShape(tp_size=4), 2, 6)


def test_merging_joins_only_what_touches_on_both_ends() -> None:
    pieces = [Fragment(0, 8, 0, 8, 8), Fragment(0, 0, 0, 0, 8), Fragment(0, 24, 0, 16, 8)]
    assert list(merge_fragments(pieces)) == [Fragment(0, 0, 0, 0, 16), Fragment(0, 24, 0, 16, 8)]
    other_pools = [Fragment(0, 0, 0, 0, 8), Fragment(1, 8, 0, 8, 8), Fragment(1, 16, 1, 16, 8)]
    assert list(merge_fragments(other_pools)) == other_pools


def test_pages_of_another_alignment_are_not_copied_with_their_padding() -> None:
    (info,) = whole(Side(), (Attention(2, kv_factor=1, head_dim=3),))
    (view,) = info.page_table.views
    wide = view.model_copy(update={"page_stride_bytes": 256})
    assert list(page_runs(view, view)) == [PageRun(0, 0, view.page_stride_bytes)]
    assert list(page_runs(wide, view)) == [PageRun(0, 0, view.page_bytes)]


def test_mixed_dtypes_keep_their_own_pools() -> None:
    layers = (Attention(4, dtype=ElementType.PACKED4), Attention(4, dtype=ElementType.FLOAT8_E4M3))
    pair = same_model(replace(ONE, tp=2, drafts=True), replace(ONE, drafts=True), layers, DRAFT)
    (receiver,) = pair.receivers(0)
    for sender in pair.senders(0):
        plan = TransferPlan.between(sender, receiver)
        # Packed data, its scales, float8 and the drafter's 16-bit pages: each in both ends' pool.
        pools = {
            (group.sender.layer_group, piece.sender_pool, piece.receiver_pool)
            for group in plan.groups
            for piece in group.fragments
        }
        assert len({receiver_pool for _, _, receiver_pool in pools}) >= 2
        assert sum(group.block_bytes for group in plan.groups) * 2 == sum(
            group.receiver.block_bytes for group in plan.groups
        )
