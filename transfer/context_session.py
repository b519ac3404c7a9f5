"""The sending end of one request's pages.

grant -> announce -> ready -> each finished chunk posted while the next one computes -> handoff ->
received. A lease is given with every chunk and is over when the sends posted from it have ended,
whatever became of the request. Chunks that are final before the receiver's pages are known wait
here with their leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transfer.agent_events import GrantReceived, LeaseEnded
from transfer.costs import TransferCosts, staging_pays
from transfer.deadlines import TransferLimits
from transfer.identity import Incarnation
from transfer.lease import GroupBlocks, LeasedBlocks
from transfer.messages import (
    Announce,
    CancelSession,
    ChunkSent,
    Grant,
    GroupRuns,
    Handoff,
    NoDecode,
    Received,
    ReceiveReady,
    SenderFailed,
)
from transfer.outcome import Outcome, PostStatus
from transfer.plan import GroupPlan, TransferPlan
from transfer.region import Piece
from transfer.runs import Slots, run_lengths, staging_passes, whole_pieces
from transfer.session import Handler, Session, SessionState, Transitions, ignore
from transfer.session_commands import PostSends
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    HandOffRequested,
    NoDecodeRequested,
    PeerDied,
    PeerLost,
    PostEnded,
    ShipRequested,
)
from transfer.staged_cut import staged_lengths, staged_messages, staged_pieces
from transfer.wire import FrameError, pack_ints, unpack_ints


@dataclass(frozen=True, eq=False)
class _Destination:
    """The receiver's pages: one tag, slots a layer group, first block not wanted any more."""

    tag: int
    end_block: int
    groups: tuple[GroupBlocks, ...]


class PageGone(ValueError):
    """A block that the receiver wants has no page here any more."""


class ContextSession(Session):
    """Delivers the pages of one request to one generation rank."""

    def __init__(
        self,
        *,
        request_id: str,
        session: str,
        peer: Incarnation,
        plan: TransferPlan,
        limits: TransferLimits,
        costs: TransferCosts,
    ) -> None:
        super().__init__(
            request_id=request_id, session=session, peer=peer, plan=plan, limits=limits
        )
        self._costs: Final = costs
        self._destination: _Destination | None = None
        self._cursors: list[int] = []
        self._shipped_end = 0
        self._waiting: list[LeasedBlocks] = []
        self._waiting_ends: list[int] = []
        self._chunks = 0
        self._handoff: HandOffRequested | None = None

    @override
    def _transitions(self) -> Transitions:
        return CONTEXT_TRANSITIONS

    @override
    def _last_word(self, outcome: Outcome, reason: str) -> None:
        if outcome is Outcome.CANCELLED:
            self._send(CancelSession(session=self.session, reason=reason))
        else:
            self._send(SenderFailed(session=self.session, reason=reason))

    @override
    def _peer_may_write(self) -> bool:
        return False

    @override
    def _waits_for_peer(self) -> bool:
        return self.state is SessionState.HANDED_OFF

    def _on_grant(self, event: Grant) -> None:
        self._request_deadline_ms = self._now_ms + event.deadline_ms
        self._report(GrantReceived(self.request_id, self.peer))
        self.state = SessionState.GRANTED

    def _on_announce_requested(self, _event: AnnounceRequested) -> None:
        self._send(Announce(session=self.session))
        self.state = SessionState.ANNOUNCED

    def _on_ready(self, event: ReceiveReady) -> None:
        try:
            self._destination = self._read_ready(event)
        except FrameError as error:
            self._break_off(str(error))
            return
        self._cursors = [group.first_block for group in self._destination.groups]
        computed = self.state is SessionState.COMPUTED
        self.state = SessionState.SHIPPING
        waiting, self._waiting = self._waiting, []
        ends, self._waiting_ends = self._waiting_ends, []
        for blocks, end_block in zip(waiting, ends, strict=True):
            if self.state is SessionState.SHIPPING:
                self._ship(blocks, end_block)
        if computed and self.state is SessionState.SHIPPING:
            self._hand_off()

    def _read_ready(self, event: ReceiveReady) -> _Destination:
        if len(event.groups) != len(self._plan.groups):
            raise FrameError(
                f"receive ready: expected {len(self._plan.groups)} layer groups, "
                f"got {len(event.groups)}"
            )
        groups = []
        for entry in event.groups:
            slots = unpack_ints(entry.slots)
            if entry.first_block + len(slots) != event.end_block or (
                len(slots) and int(slots.min()) < -1
            ):
                raise FrameError(
                    f"receive ready: expected slots of blocks [{entry.first_block}, "
                    f"{event.end_block}), each -1 or more, got {len(slots)}"
                )
            groups.append(GroupBlocks(entry.first_block, slots))
        return _Destination(event.tag, event.end_block, tuple(groups))

    def _on_ship(self, event: ShipRequested) -> None:
        self._check_ship(event)
        self._ledger.hold(event.blocks)
        self._shipped_end = event.end_block
        if self._destination is None:
            self._waiting.append(event.blocks)
            self._waiting_ends.append(event.end_block)
        else:
            self._ship(event.blocks, event.end_block)

    def _check_ship(self, event: ShipRequested) -> None:
        if event.first_block != self._shipped_end or event.end_block < event.first_block:
            raise ValueError(
                f"expected blocks from {self._shipped_end} on, got "
                f"[{event.first_block}, {event.end_block}); ship in order, each block once"
            )
        if len(event.blocks.groups) != len(self._plan.groups):
            raise ValueError(
                f"expected slots of {len(self._plan.groups)} layer groups, "
                f"got {len(event.blocks.groups)}; give one entry a group of the plan"
            )

    def _ship(self, blocks: LeasedBlocks, end_block: int) -> None:
        """Post what the receiver wants of the blocks before ``end_block``, then tell it."""
        destination = self._destination
        assert destination is not None
        try:
            runs, pieces, wanted = self._cut(destination, blocks, end_block)
        except PageGone as error:
            self._give_up(Outcome.FAILED, str(error))
            return
        posts = self._post(blocks.lease, pieces)
        self._ledger.retire(blocks.lease)
        if posts:
            self._commands.append(PostSends(destination.tag, posts))
        if any(entry.end_block > entry.first_block for entry in runs):
            self._send(ChunkSent(session=self.session, chunk=self._chunks, groups=tuple(runs)))
            self._chunks += 1
        self._cursors = [entry.end_block for entry in runs]
        self._moved_blocks += wanted

    def _cut(
        self, destination: _Destination, blocks: LeasedBlocks, end_block: int
    ) -> tuple[list[GroupRuns], list[tuple[Piece, int]], int]:
        """Runs and pieces a layer group, and how many different blocks they hold."""
        end_block = min(end_block, destination.end_block)
        runs: list[GroupRuns] = []
        pieces: list[tuple[Piece, int]] = []
        wanted: set[int] = set()
        for index, group in enumerate(self._plan.groups):
            start = self._cursors[index]
            end = max(start, end_block)
            target = destination.groups[index]
            held = target.slots[start - target.first_block : end - target.first_block]
            ordinals = np.flatnonzero(held >= 0) + start
            sources = source_slots(blocks.groups[index], ordinals, index)
            targets = held[held >= 0]
            lengths = run_lengths(sources, targets)
            staged = self._stages(group, len(lengths), sources, targets)
            if staged:
                sizes = (group.block_bytes, self._plan.message_bytes)
                lengths = staged_lengths(len(sources), *sizes)
                pieces.extend(staged_pieces(index, sources, lengths, *sizes))
            else:
                pieces.extend(whole_pieces(group.sender, sources, lengths))
            runs.append(
                GroupRuns(
                    first_block=start, end_block=end, run_blocks=pack_ints(lengths), staged=staged
                )
            )
            wanted.update(ordinals.tolist())
        return runs, pieces, len(wanted)

    def _stages(self, group: GroupPlan, runs: int, sources: Slots, targets: Slots) -> bool:
        """Whether these blocks of a group pass through staging: they must, or it pays."""
        if not group.direct:
            return True
        if not self._plan.stages:
            return False
        pools, blocks = len(group.sender.slot_bytes), len(sources)
        staged = staged_messages(blocks, group.block_bytes, self._plan.message_bytes)
        passes = staging_passes(pools, sources, targets)
        size_bytes = blocks * group.block_bytes
        return staging_pays(runs * pools, staged, size_bytes, passes, self._costs)

    def _on_late_ship(self, event: ShipRequested) -> None:
        self._report(LeaseEnded(self.request_id, event.blocks.lease))

    def _on_hand_off_early(self, event: HandOffRequested) -> None:
        self._handoff = event
        self.state = SessionState.COMPUTED

    def _on_hand_off(self, event: HandOffRequested) -> None:
        self._handoff = event
        self._hand_off()

    def _hand_off(self) -> None:
        assert self._destination is not None
        assert self._handoff is not None
        if self._shipped_end < self._destination.end_block:
            self._give_up(
                Outcome.FAILED,
                f"receiver wants blocks up to {self._destination.end_block}, "
                f"only {self._shipped_end} were computed",
            )
            return
        self._send(Handoff(session=self.session, data=self._handoff.data))
        self._progress_ms = self._now_ms
        self.state = SessionState.HANDED_OFF

    def _on_received(self, _event: Received) -> None:
        self._decide(Outcome.SUCCEEDED, "received")

    def _on_no_decode(self, _event: NoDecodeRequested) -> None:
        self._send(NoDecode(session=self.session))
        self._decide(Outcome.SUCCEEDED, "nothing to decode")

    def _on_cancel_session(self, event: CancelSession) -> None:
        self._give_up(Outcome.CANCELLED, event.reason)

    def _on_cancel_requested(self, event: CancelRequested) -> None:
        self._give_up(Outcome.CANCELLED, event.reason)

    def _on_failure(self, event: FailureReported) -> None:
        self._give_up(Outcome.FAILED, event.reason)

    def _on_post_ended(self, event: PostEnded) -> None:
        self._on_drained(event)
        if event.status is not PostStatus.DONE:
            self._break_off(f"send {event.post} ended {event.status.value}")


def source_slots(group: GroupBlocks, ordinals: npt.NDArray[np.int64], index: int) -> Slots:
    """Our slots of these blocks. Raises PageGone where a page is not held."""
    places = ordinals - group.first_block
    if len(places) and (places[0] < 0 or places[-1] >= len(group.slots)):
        raise PageGone(
            f"layer group {index}: receiver wants blocks {ordinals[0]} to {ordinals[-1]}, "
            f"the lease holds [{group.first_block}, {group.end_block})"
        )
    slots = group.slots[places]
    if np.any(slots < 0):
        raise PageGone(
            f"layer group {index}: receiver wants block {ordinals[slots < 0][0]}, "
            "whose page is gone here"
        )
    return slots


_S = SessionState
_C = ContextSession
_UNDECIDED: Final[Mapping[type, Handler]] = {
    Grant: ignore,
    CancelSession: _C._on_cancel_session,
    CancelRequested: _C._on_cancel_requested,
    FailureReported: _C._on_failure,
    PeerLost: _C._on_peer_lost,
    PeerDied: _C._on_peer_died,
    DeadlinePassed: _C._on_deadline,
}
_DECIDED: Final[Mapping[type, Handler]] = {
    Grant: ignore,
    ReceiveReady: ignore,
    Received: ignore,
    CancelSession: ignore,
    AnnounceRequested: ignore,
    ShipRequested: _C._on_late_ship,
    HandOffRequested: ignore,
    NoDecodeRequested: ignore,
    CancelRequested: ignore,
    FailureReported: ignore,
}
_BY_STATE: Final[Mapping[SessionState, Mapping[type, Handler]]] = {
    _S.NEW: {
        Grant: _C._on_grant,
        CancelRequested: _C._on_cancel_requested,
        FailureReported: _C._on_failure,
        PeerLost: _C._on_peer_lost,
        PeerDied: _C._on_peer_died,
    },
    _S.GRANTED: {
        **_UNDECIDED,
        AnnounceRequested: _C._on_announce_requested,
        NoDecodeRequested: _C._on_no_decode,
    },
    _S.ANNOUNCED: {
        **_UNDECIDED,
        ReceiveReady: _C._on_ready,
        ShipRequested: _C._on_ship,
        HandOffRequested: _C._on_hand_off_early,
        NoDecodeRequested: _C._on_no_decode,
    },
    _S.COMPUTED: {
        **_UNDECIDED,
        ReceiveReady: _C._on_ready,
        NoDecodeRequested: _C._on_no_decode,
    },
    _S.SHIPPING: {
        **_UNDECIDED,
        ReceiveReady: ignore,
        ShipRequested: _C._on_ship,
        HandOffRequested: _C._on_hand_off,
        NoDecodeRequested: _C._on_no_decode,
        PostEnded: _C._on_post_ended,
    },
    _S.HANDED_OFF: {
        **_UNDECIDED,
        ReceiveReady: ignore,
        NoDecodeRequested: _C._on_no_decode,
        Received: _C._on_received,
        PostEnded: _C._on_post_ended,
    },
    _S.CLOSING: {
        **_DECIDED,
        PostEnded: _C._on_drained,
        PeerLost: _C._on_peer_lost,
        PeerDied: _C._on_peer_died,
        DeadlinePassed: _C._on_deadline,
    },
    _S.DOUBT: {
        **_DECIDED,
        PostEnded: _C._on_drained,
        PeerLost: _C._on_peer_lost,
        PeerDied: _C._on_peer_died,
        DeadlinePassed: ignore,
    },
    _S.CLOSED: {
        **_DECIDED,
        PostEnded: ignore,
        PeerLost: ignore,
        PeerDied: ignore,
        DeadlinePassed: ignore,
    },
}
CONTEXT_TRANSITIONS: Final[Transitions] = {
    (state, event): handler
    for state, handlers in _BY_STATE.items()
    for event, handler in handlers.items()
}
_WORK: Final = frozenset({AnnounceRequested, ShipRequested, HandOffRequested})
CONTEXT_IMPOSSIBLE: Final[Mapping[SessionState, frozenset[type]]] = {
    # A session starts with the grant.
    _S.NEW: _WORK
    | {ReceiveReady, Received, CancelSession, NoDecodeRequested, PostEnded, DeadlinePassed},
    # Work starts with the announcement, and the receiver answers only that.
    _S.GRANTED: frozenset({ReceiveReady, Received, ShipRequested, HandOffRequested, PostEnded}),
    # Nothing was posted before the receiver's pages are known, nothing is received before that.
    _S.ANNOUNCED: frozenset({AnnounceRequested, Received, PostEnded}),
    _S.COMPUTED: _WORK | {Received, PostEnded},
    # Received answers the handoff.
    _S.SHIPPING: frozenset({AnnounceRequested, Received}),
    _S.HANDED_OFF: _WORK,
    _S.CLOSING: frozenset(),
    _S.DOUBT: frozenset(),
    _S.CLOSED: frozenset(),
}
"""Pairs that raise InvalidTransition; with the transitions they make up every pair."""
