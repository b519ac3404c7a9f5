"""Which shard of a view's pages a rank holds, and which of several holders sends it.

The heads of a view (or the elements of each of its sections) are cut into equal shards, in order of
the attention tp ranks. With fewer shards than ranks each is held by as many consecutive ranks as
it takes; replicated pages are one shard. Every rank of a context parallel group holds the same
shard, of other blocks.
"""

from __future__ import annotations

from math import gcd

from transfer.rank_info import PageView, ParallelShape


def num_shards(view: PageView) -> int:
    """Shards of the view over all ranks."""
    return 1 if view.mapping == "replicated" else view.total_heads // view.num_heads


def shard_index(view: PageView) -> int:
    """The shard that the view's rank holds."""
    return 0 if view.mapping == "replicated" else view.first_head // view.num_heads


def is_elected(sender: ParallelShape, source: PageView, receiver: ParallelShape) -> bool:
    """Whether this sender, and no other holder of its shard, sends it to this receiver.

    Ranks that lie beside the receiver's are preferred: between equal sizes every rank sends to its
    like and slots stay whole. Among those left, receivers of other dp groups, stages and context
    parallel ranks take turns, so that holders share the work.
    """
    copies = sender.attention_tp_size // num_shards(source)
    first = sender.attention_tp_rank // copies * copies
    holders = range(first, first + copies)
    beside = _ranks_beside(receiver, sender.attention_tp_size)
    near = [rank for rank in holders if rank in beside] or list(holders)
    return near[_lane(receiver) % len(near)] == sender.attention_tp_rank


def is_elected_for_state(sender: ParallelShape, receiver: ParallelShape) -> bool:
    """Whether this one of the context parallel ranks, which all hold a sequence's whole state,
    sends it to this receiver.
    """
    return _lane(receiver) % sender.cp_size == sender.cp_rank


def share_blocks(sender: ParallelShape, receiver: ParallelShape) -> bool:
    """Whether any block lies on both ranks: rank r of cp n holds blocks r, r + n, ..."""
    return (sender.cp_rank - receiver.cp_rank) % gcd(sender.cp_size, receiver.cp_size) == 0


def _ranks_beside(receiver: ParallelShape, ranks: int) -> range:
    """Of ``ranks`` ranks, those whose share of the heads overlaps the receiver's, if both cut."""
    rank, size = receiver.attention_tp_rank, receiver.attention_tp_size
    return range(rank * ranks // size, -(-(rank + 1) * ranks // size))


def _lane(receiver: ParallelShape) -> int:
    # Context parallel ranks last, so that between equal cp sizes the lane picks the same rank.
    stage = receiver.dp_rank * receiver.pp_size + receiver.pp_rank
    return stage * receiver.cp_size + receiver.cp_rank
