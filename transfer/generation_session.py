"""The receiving end of one request's pages.

grant -> announce -> ready -> runs of each chunk, posted in the order in which the sender tells
them -> handoff -> received. The lease is over when the sender has had its last word (or is lost)
and every posted receive has ended: after a cancellation announced runs are still received, into
pages that are still leased, so that no send is left without its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transfer.agent_events import (
    AnnounceReceived,
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    NoDecodeReceived,
)
from transfer.deadlines import TransferLimits
from transfer.identity import Incarnation
from transfer.lease import GroupBlocks, LeasedBlocks
from transfer.messages import (
    Announce,
    CancelSession,
    ChunkSent,
    Grant,
    GroupRuns,
    GroupSlots,
    Handoff,
    NoDecode,
    Received,
    ReceiveReady,
    SenderFailed,
)
from transfer.outcome import Outcome, PostStatus
from transfer.plan import TransferPlan
from transfer.region import Piece
from transfer.runs import Slots, whole_pieces
from transfer.session import Handler, Session, SessionState, Transitions, ignore
from transfer.session_commands import PostReceives
from transfer.session_events import (
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    GrantRequested,
    PagesReady,
    PeerDied,
    PeerLost,
    PostEnded,
)
from transfer.staged_cut import staged_pieces
from transfer.wire import pack_ints, unpack_ints


class BrokenPromise(ValueError):
    """The peer's message contradicts what both sides agreed on."""


@dataclass(eq=False)
class _Chunk:
    """A chunk under way: blocks it brings, the end it reaches, posts that have not ended."""

    end_block: int
    blocks: int
    open: set[int]


class GenerationSession(Session):
    """Fills the pages of one request from one context rank. ``tag`` is random, minted here."""

    def __init__(
        self,
        *,
        request_id: str,
        session: str,
        peer: Incarnation,
        plan: TransferPlan,
        limits: TransferLimits,
        tag: int,
    ) -> None:
        super().__init__(
            request_id=request_id, session=session, peer=peer, plan=plan, limits=limits
        )
        self._tag: Final = tag
        self._blocks: LeasedBlocks | None = None
        self._end_block = 0
        self._cursors: list[int] = []
        self._next_chunk = 0
        self._chunks: deque[_Chunk] = deque()
        self._handoff: Handoff | None = None
        self._peer_done = False

    @override
    def _transitions(self) -> Transitions:
        return GENERATION_TRANSITIONS

    @override
    def _last_word(self, outcome: Outcome, reason: str) -> None:
        self._send(CancelSession(session=self.session, reason=reason))

    @override
    def _peer_may_write(self) -> bool:
        return not self._peer_done and self._fate is None

    @override
    def _waits_for_peer(self) -> bool:
        return False

    def _on_grant_requested(self, event: GrantRequested) -> None:
        self._request_deadline_ms = self._now_ms + event.deadline_ms
        self._send(
            Grant(
                request_id=self.request_id,
                session=self.session,
                prompt_tokens=event.prompt_tokens,
                deadline_ms=event.deadline_ms,
                receivers=event.receivers,
            )
        )
        self.state = SessionState.GRANTED

    def _on_announce(self, _event: Announce) -> None:
        self._report(AnnounceReceived(self.request_id))
        self.state = SessionState.ANNOUNCED

    def _on_pages_ready(self, event: PagesReady) -> None:
        self._check_ready(event)
        self._ledger.hold(event.blocks)
        self._blocks = event.blocks
        self._end_block = event.end_block
        self._cursors = [group.first_block for group in event.blocks.groups]
        self._send(
            ReceiveReady(
                session=self.session,
                tag=self._tag,
                end_block=event.end_block,
                groups=tuple(
                    GroupSlots(first_block=group.first_block, slots=pack_ints(group.slots))
                    for group in event.blocks.groups
                ),
            )
        )
        self.state = SessionState.RECEIVING

    def _check_ready(self, event: PagesReady) -> None:
        if len(event.blocks.groups) != len(self._plan.groups):
            raise ValueError(
                f"expected slots of {len(self._plan.groups)} layer groups, "
                f"got {len(event.blocks.groups)}; give one entry a group of the plan"
            )
        for group in event.blocks.groups:
            if group.end_block != event.end_block:
                raise ValueError(
                    f"expected slots up to block {event.end_block}, got {group.end_block}; "
                    "start a group with nothing to receive at the end block"
                )

    def _on_late_pages(self, event: PagesReady) -> None:
        self._report(LeaseEnded(self.request_id, event.blocks.lease))

    def _on_chunk(self, event: ChunkSent) -> None:
        if event.chunk < self._next_chunk:
            return
        try:
            self._post_chunk(event)
        except BrokenPromise as error:
            self._break_off(f"chunk {event.chunk}: {error}")

    def _on_chunk_while_closing(self, event: ChunkSent) -> None:
        if self._peer_may_write() and not self._peer_dropped:
            self._on_chunk(event)

    def _on_repeated_chunk(self, event: ChunkSent) -> None:
        if event.chunk >= self._next_chunk:
            self._break_off(f"chunk {event.chunk} came after the handoff")

    def _post_chunk(self, event: ChunkSent) -> None:
        blocks = self._blocks
        if blocks is None:
            raise BrokenPromise("no pages were given yet")
        if event.chunk != self._next_chunk or len(event.groups) != len(blocks.groups):
            raise BrokenPromise(
                f"expected chunk {self._next_chunk} of {len(blocks.groups)} layer groups, "
                f"got {event.chunk} of {len(event.groups)}"
            )
        pieces: list[tuple[Piece, int]] = []
        wanted: set[int] = set()
        for index, runs in enumerate(event.groups):
            if not self._cursors[index] == runs.first_block <= runs.end_block <= self._end_block:
                raise BrokenPromise(
                    f"layer group {index}: expected blocks from {self._cursors[index]} to at most "
                    f"{self._end_block}, got [{runs.first_block}, {runs.end_block})"
                )
            ordinals = wanted_blocks(blocks.groups[index], runs.first_block, runs.end_block)
            slots = blocks.groups[index].slots[ordinals - blocks.groups[index].first_block]
            try:
                pieces.extend(self._pieces(index, slots, runs))
            except ValueError as error:
                raise BrokenPromise(f"layer group {index}: {error}") from error
            wanted.update(ordinals.tolist())
        posts = self._post(blocks.lease, pieces)
        self._next_chunk += 1
        self._cursors = [runs.end_block for runs in event.groups]
        self._chunks.append(
            _Chunk(
                end_block=max(self._cursors, default=0),
                blocks=len(wanted),
                open={post.id for post in posts},
            )
        )
        if posts:
            self._commands.append(PostReceives(self._tag, posts))
        self._report_chunks()

    def _pieces(self, index: int, slots: Slots, runs: GroupRuns) -> Iterator[tuple[Piece, int]]:
        """Messages of one layer group as the sender cut them, each with its bytes.

        Raises ValueError for a cut that does not fit our slots, or that this pair cannot carry.
        """
        group = self._plan.groups[index]
        lengths = unpack_ints(runs.run_blocks)
        if runs.staged and not self._plan.stages:
            raise ValueError("pages were staged between memories that cannot stage")
        if not runs.staged and not group.direct:
            raise ValueError("whole slots were sent where layouts differ")
        if runs.staged:
            return staged_pieces(index, slots, lengths, group.block_bytes, self._plan.message_bytes)
        return whole_pieces(group.receiver, slots, lengths)

    def _on_post_ended(self, event: PostEnded) -> None:
        self._on_drained(event)
        if event.status is not PostStatus.DONE:
            self._break_off(f"receive {event.post} ended {event.status.value}")
            return
        for chunk in self._chunks:
            chunk.open.discard(event.post)
        self._report_chunks()
        self._complete_if_all_in()

    def _report_chunks(self) -> None:
        while self._chunks and not self._chunks[0].open:
            chunk = self._chunks.popleft()
            self._moved_blocks += chunk.blocks
            if self.state not in (SessionState.RECEIVING, SessionState.COMPLETING):
                continue
            self._report(ChunkReceived(self.request_id, chunk.end_block))

    def _on_handoff(self, event: Handoff) -> None:
        self._peer_done = True
        if any(cursor != self._end_block for cursor in self._cursors):
            self._break_off(
                f"handoff came at blocks {self._cursors}, expected all at {self._end_block}"
            )
            return
        self._handoff = event
        self.state = SessionState.COMPLETING
        self._complete_if_all_in()

    def _complete_if_all_in(self) -> None:
        if self._handoff is None or self._ledger.open_posts:
            return
        self._report(HandoffReceived(self.request_id, self._handoff.data))
        self._send(Received(session=self.session))
        self._decide(Outcome.SUCCEEDED, "received")

    def _on_no_decode(self, _event: NoDecode) -> None:
        self._peer_done = True
        self._report(NoDecodeReceived(self.request_id))
        self._decide(Outcome.SUCCEEDED, "nothing to decode")

    def _on_sender_failed(self, event: SenderFailed) -> None:
        self._peer_done = True
        self._decide(Outcome.FAILED, f"sender failed: {event.reason}")

    def _on_cancel_session(self, event: CancelSession) -> None:
        self._peer_done = True
        self._give_up(Outcome.CANCELLED, event.reason)

    def _on_last_word(self, _event: object) -> None:
        self._peer_done = True

    def _on_cancel_requested(self, event: CancelRequested) -> None:
        self._give_up(Outcome.CANCELLED, event.reason)

    def _on_failure(self, event: FailureReported) -> None:
        self._give_up(Outcome.FAILED, event.reason)


def wanted_blocks(group: GroupBlocks, start: int, end: int) -> npt.NDArray[np.int64]:
    """Block ordinals of ``[start, end)`` for which ``group`` holds a slot, ascending, int64."""
    held = group.slots[start - group.first_block : end - group.first_block]
    return np.flatnonzero(held >= 0) + start


_S = SessionState
_G = GenerationSession
_UNDECIDED: Final[Mapping[type, Handler]] = {
    NoDecode: _G._on_no_decode,
    SenderFailed: _G._on_sender_failed,
    CancelSession: _G._on_cancel_session,
    CancelRequested: _G._on_cancel_requested,
    FailureReported: _G._on_failure,
    PeerLost: _G._on_peer_lost,
    PeerDied: _G._on_peer_died,
    DeadlinePassed: _G._on_deadline,
}
_BY_STATE: Final[Mapping[SessionState, Mapping[type, Handler]]] = {
    _S.NEW: {
        GrantRequested: _G._on_grant_requested,
        CancelRequested: _G._on_cancel_requested,
        FailureReported: _G._on_failure,
        PeerLost: _G._on_peer_lost,
        PeerDied: _G._on_peer_died,
    },
    _S.GRANTED: {**_UNDECIDED, Announce: _G._on_announce},
    _S.ANNOUNCED: {**_UNDECIDED, Announce: ignore, PagesReady: _G._on_pages_ready},
    _S.RECEIVING: {
        **_UNDECIDED,
        Announce: ignore,
        ChunkSent: _G._on_chunk,
        PostEnded: _G._on_post_ended,
        Handoff: _G._on_handoff,
    },
    _S.COMPLETING: {
        **_UNDECIDED,
        Announce: ignore,
        ChunkSent: _G._on_repeated_chunk,
        PostEnded: _G._on_post_ended,
        Handoff: ignore,
    },
    _S.CLOSING: {
        Announce: ignore,
        ChunkSent: _G._on_chunk_while_closing,
        PostEnded: _G._on_drained,
        Handoff: _G._on_last_word,
        NoDecode: _G._on_last_word,
        SenderFailed: _G._on_last_word,
        CancelSession: _G._on_last_word,
        CancelRequested: ignore,
        FailureReported: ignore,
        PeerLost: _G._on_peer_lost,
        PeerDied: _G._on_peer_died,
        DeadlinePassed: _G._on_deadline,
    },
    _S.DOUBT: {
        PostEnded: _G._on_drained,
        CancelRequested: ignore,
        FailureReported: ignore,
        PeerLost: _G._on_peer_lost,
        PeerDied: _G._on_peer_died,
        DeadlinePassed: ignore,
    },
    _S.CLOSED: {
        PagesReady: _G._on_late_pages,
        Announce: ignore,
        ChunkSent: ignore,
        PostEnded: ignore,
        Handoff: ignore,
        NoDecode: ignore,
        SenderFailed: ignore,
        CancelSession: ignore,
        CancelRequested: ignore,
        FailureReported: ignore,
        PeerLost: ignore,
        PeerDied: ignore,
        DeadlinePassed: ignore,
    },
}
GENERATION_TRANSITIONS: Final[Transitions] = {
    (state, event): handler
    for state, handlers in _BY_STATE.items()
    for event, handler in handlers.items()
}
_MESSAGES: Final = frozenset({Announce, ChunkSent, Handoff, NoDecode, SenderFailed, CancelSession})
GENERATION_IMPOSSIBLE: Final[Mapping[SessionState, frozenset[type]]] = {
    # The grant has not been sent: the peer does not know this session.
    _S.NEW: _MESSAGES | {PagesReady, PostEnded, DeadlinePassed},
    # Pages are given after the announcement, bytes and handoff come after the pages.
    _S.GRANTED: frozenset({GrantRequested, PagesReady, PostEnded, ChunkSent, Handoff}),
    _S.ANNOUNCED: frozenset({GrantRequested, PostEnded, ChunkSent, Handoff}),
    # Pages are given once.
    _S.RECEIVING: frozenset({GrantRequested, PagesReady}),
    _S.COMPLETING: frozenset({GrantRequested, PagesReady}),
    _S.CLOSING: frozenset({GrantRequested, PagesReady}),
    # The connection is gone, and with it its messages.
    _S.DOUBT: _MESSAGES | {GrantRequested, PagesReady},
    _S.CLOSED: frozenset({GrantRequested}),
}
"""Pairs that raise InvalidTransition; with the transitions they make up every pair."""
