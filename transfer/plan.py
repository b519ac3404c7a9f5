"""Which bytes of the sender's slots are which bytes of the receiver's, for one pair of ranks.

A function of two ``RankInfo`` values, computed alike by both ends, so that an index into
``groups`` means the same on both. Fragments are worked out per (owner, head count) view: layers
held by both ranks, heads held by both, and of several ranks that hold the same head one elected
sender, so that over all senders every byte of the receiver is written exactly once. Where the
fragments of a layer group are whole slots on both ends the group is *direct*: its slots move from
leased page to leased page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transfer.rank_info import PageBuffer, PageGroup, PageView, ParallelShape, RankInfo


@dataclass(frozen=True, slots=True)
class Fragment:
    """Bytes of one block: where they lie in a slot of the sender and in one of the receiver."""

    sender_pool: int
    sender_offset_bytes: int
    receiver_pool: int
    receiver_offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GroupSide:
    """One end of a layer group: its id there, its pool group and the slot size in each pool."""

    layer_group: int
    pool_group: int
    slot_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot over all pools."""
        return sum(self.slot_bytes)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One layer group of the sender paired with one of the receiver that shares layers with it."""

    sender: GroupSide
    receiver: GroupSide
    fragments: tuple[Fragment, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes that move for one block."""
        return sum(fragment.size_bytes for fragment in self.fragments)

    @property
    def direct(self) -> bool:
        """Whether whole slots move, pool by pool."""
        whole = tuple(
            Fragment(pool, 0, pool, 0, size) for pool, size in enumerate(self.sender.slot_bytes)
        )
        return self.sender.slot_bytes == self.receiver.slot_bytes and self.fragments == whole


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How pages go from one sender rank to one receiver rank."""

    groups: tuple[GroupPlan, ...]

    @classmethod
    def between(cls, sender: RankInfo, receiver: RankInfo) -> TransferPlan:
        """Plan of a pair that ``check_peer`` has passed."""
        groups = []
        for receiver_group in receiver.page_table.groups:
            for sender_group in sender.page_table.groups:
                fragments = tuple(
                    merge_fragments(
                        _group_fragments(sender, sender_group, receiver, receiver_group)
                    )
                )
                if fragments:
                    groups.append(GroupPlan(_side(sender_group), _side(receiver_group), fragments))
        return cls(tuple(groups))


def _side(group: PageGroup) -> GroupSide:
    return GroupSide(group.layer_group, group.pool_group, group.slot_bytes)


def _group_fragments(
    sender: RankInfo, sender_group: PageGroup, receiver: RankInfo, receiver_group: PageGroup
) -> Iterator[Fragment]:
    for source in sender.page_table.views:
        if source.layer_group != sender_group.layer_group:
            continue
        sources = {(buffer.layer_id, buffer.role): buffer for buffer in source.buffers}
        for target in receiver.page_table.views:
            if (
                target.layer_group != receiver_group.layer_group
                or target.owner != source.owner
                or page_facts(target) != page_facts(source)
            ):
                continue
            heads = tuple(elected_heads(sender.shape, source, receiver.shape, target))
            for buffer in target.buffers:
                origin = sources.get((buffer.layer_id, buffer.role))
                if origin is not None:
                    yield from _buffer_fragments(source, origin, target, buffer, heads)


def page_facts(view: PageView) -> tuple[object, ...]:
    """What must be equal for bytes of one view to mean the same in another; heads may differ."""
    return (
        view.mapping,
        view.element,
        view.total_heads,
        view.elements_per_head,
        view.tokens_per_page,
        view.pages_per_block,
        view.sections,
        view.page_bytes // view.num_heads,
    )


def holders(shape: ParallelShape, view: PageView, head: int) -> tuple[int, ...]:
    """Attention tp ranks of an instance that hold ``head`` in a view like ``view``, ascending."""
    ranks = shape.attention_tp_size
    if view.mapping == "replicated":
        return tuple(range(ranks))
    if view.total_heads >= ranks:
        return (head // view.num_heads,)
    copies = ranks // view.total_heads
    return tuple(range(head * copies, (head + 1) * copies))


def elected_heads(
    sender: ParallelShape, source: PageView, receiver: ParallelShape, target: PageView
) -> Iterator[int]:
    """Heads that this sender, and no other rank of its instance, writes into ``target``."""
    for head in range(target.first_head, target.first_head + target.num_heads):
        candidates = holders(sender, source, head)
        elected = candidates[receiver.attention_tp_rank % len(candidates)]
        if elected == sender.attention_tp_rank:
            yield head


def _buffer_fragments(
    source: PageView,
    origin: PageBuffer,
    target: PageView,
    buffer: PageBuffer,
    heads: tuple[int, ...],
) -> Iterator[Fragment]:
    if (
        len(heads) == source.num_heads == target.num_heads
        and origin.size_bytes == buffer.size_bytes
        and source.page_stride_bytes == target.page_stride_bytes
    ):
        # All of it, padding between pages too, so that whole slots show as whole.
        yield Fragment(
            source.pool, origin.offset_bytes, target.pool, buffer.offset_bytes, buffer.size_bytes
        )
        return
    head_bytes = target.page_bytes // target.num_heads
    for page in range(target.pages_per_block):
        for head in heads:
            yield Fragment(
                source.pool,
                origin.offset_bytes
                + page * source.page_stride_bytes
                + (head - source.first_head) * head_bytes,
                target.pool,
                buffer.offset_bytes
                + page * target.page_stride_bytes
                + (head - target.first_head) * head_bytes,
                head_bytes,
            )


def merge_fragments(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """The same bytes in receiver order, neighbours that touch on both ends joined."""
    ordered = sorted(
        fragments, key=lambda entry: (entry.receiver_pool, entry.receiver_offset_bytes)
    )
    last: Fragment | None = None
    for fragment in ordered:
        if (
            last is not None
            and last.sender_pool == fragment.sender_pool
            and last.receiver_pool == fragment.receiver_pool
            and last.sender_offset_bytes + last.size_bytes == fragment.sender_offset_bytes
            and last.receiver_offset_bytes + last.size_bytes == fragment.receiver_offset_bytes
        ):
            last = Fragment(
                last.sender_pool,
                last.sender_offset_bytes,
                last.receiver_pool,
                last.receiver_offset_bytes,
                last.size_bytes + fragment.size_bytes,
            )
            continue
        if last is not None:
            yield last
        last = fragment
    if last is not None:
        yield last
