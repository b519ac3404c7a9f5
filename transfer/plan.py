"""Which bytes of the sender's slots are which bytes of the receiver's, for one pair of ranks.

A function of two ``RankInfo`` values, computed alike by both ends, so that an index into
``groups`` means the same on both. Fragments are worked out per (owner, head count) view: layers
held by both ranks, heads held by both, and of several ranks that hold the same heads one elected
sender, so that over all senders of a data parallel group every byte of the receiver is written
exactly once. Where the fragments of a layer group are whole slots on both ends the group is
*direct*: its slots can move from leased page to leased page; others a ``CopyPlan`` gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transfer.held_blocks import ALL_BLOCKS, BlockPairs, HeldBlocks, block_pairs
from transfer.page_runs import PageRun, page_runs
from transfer.rank_info import PageBuffer, PageGroup, PageView, RankInfo
from transfer.sharding import is_elected, is_elected_for_state, share_blocks
from transfer.staged_cut import STAGING_MESSAGE_BYTES


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
    """One end of a layer group: its id there, its pool group, the slot size in each pool, and which
    blocks of a request it holds.
    """

    layer_group: int
    pool_group: int
    slot_bytes: tuple[int, ...]
    held: HeldBlocks = ALL_BLOCKS

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

    def blocks(self, first_block: int, end_block: int, prompt_tokens: int) -> BlockPairs:
        """Blocks of ``[first_block, end_block)`` that move; none where the receiver holds none.

        Ordinals count over the whole sequence. Raises ValueError for blocks outside the prompt.
        """
        span = (first_block, end_block)
        return block_pairs(self.sender.held, self.receiver.held, span, prompt_tokens)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How pages go from one sender rank to one receiver rank.

    Without groups the two ranks have nothing to say to each other.
    """

    groups: tuple[GroupPlan, ...]
    receiver_only_drafts: tuple[int, ...] = ()
    """Draft layers of a receiver that drafts alone: no rank of the sender has them, nothing is
    written to their pages.
    """
    sender_only_drafts: tuple[int, ...] = ()
    """Draft layers of a sender that drafts alone: nothing is read from their pages."""
    stages: bool = False
    """Whether pages can be gathered at the sender and scattered at the receiver."""
    message_bytes: int = STAGING_MESSAGE_BYTES
    """Most bytes of a staged message of more than one block."""

    @classmethod
    def between(cls, sender: RankInfo, receiver: RankInfo) -> TransferPlan:
        """Plan of a pair that ``check_peer`` has passed."""
        fragments = _fragments(sender, receiver)
        return cls(
            tuple(
                GroupPlan(_side(sender, source), _side(receiver, target), merged)
                for target in receiver.page_table.groups
                for source in sender.page_table.groups
                if (merged := fragments.get((source.layer_group, target.layer_group)))
            ),
            receiver_only_drafts=_drafts_alone(receiver, sender),
            sender_only_drafts=_drafts_alone(sender, receiver),
            stages=sender.can_stage and receiver.can_stage,
            message_bytes=min(sender.staging_message_bytes, receiver.staging_message_bytes),
        )


def _side(info: RankInfo, group: PageGroup) -> GroupSide:
    held = HeldBlocks.of(info, group)
    return GroupSide(group.layer_group, group.pool_group, group.slot_bytes, held)


def _drafts_alone(info: RankInfo, other: RankInfo) -> tuple[int, ...]:
    if other.num_draft_layers is not None:
        return ()
    return info.page_table.draft_layers


def _fragments(sender: RankInfo, receiver: RankInfo) -> dict[tuple[int, int], tuple[Fragment, ...]]:
    """Fragments by (sender's layer group, receiver's layer group), merged."""
    sources = {
        (view.owner, buffer.layer_id, buffer.role): (index, view, buffer)
        for index, view in enumerate(sender.page_table.views)
        for buffer in view.buffers
    }
    found: dict[tuple[int, int], list[Fragment]] = {}
    for target in receiver.page_table.views:
        # Layers of a view have their runs in common.
        runs: dict[int, tuple[PageRun, ...]] = {}
        for buffer in target.buffers:
            held = sources.get((target.owner, buffer.layer_id, buffer.role))
            if held is None:
                continue
            index, source, origin = held
            if index not in runs:
                runs[index] = _view_runs(sender, source, receiver, target)
            key = (source.layer_group, target.layer_group)
            found.setdefault(key, []).extend(
                _placed(run, (source.pool, origin), (target.pool, buffer)) for run in runs[index]
            )
    return {key: tuple(merge_fragments(pieces)) for key, pieces in found.items()}


def _view_runs(
    sender: RankInfo, source: PageView, receiver: RankInfo, target: PageView
) -> tuple[PageRun, ...]:
    """Runs of one buffer that this sender writes; none where another rank does."""
    if not is_elected(sender.shape, source, receiver.shape):
        return ()
    if sender.page_table.group(source.layer_group).kind == "state":
        meet = is_elected_for_state(sender.shape, receiver.shape)
    else:
        meet = share_blocks(sender.shape, receiver.shape)
    return tuple(page_runs(source, target)) if meet else ()


def _placed(
    run: PageRun, origin: tuple[int, PageBuffer], place: tuple[int, PageBuffer]
) -> Fragment:
    """``run`` of a buffer that lies in a pool of either end."""
    return Fragment(
        sender_pool=origin[0],
        sender_offset_bytes=origin[1].offset_bytes + run.sender_bytes,
        receiver_pool=place[0],
        receiver_offset_bytes=place[1].offset_bytes + run.receiver_bytes,
        size_bytes=run.size_bytes,
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
