"""The receiving end of a prefix pull: another opening of a :class:`GenerationSession`.

pull -> found -> ready -> runs -> handoff -> received, or pull -> declined. Pages are given once the
source has said how far it goes. From there on it is a receiving session like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from transfer.agent_events import PrefixFoundReceived
from transfer.generation_session import (
    GENERATION_IMPOSSIBLE,
    GENERATION_TRANSITIONS,
    GenerationSession,
)
from transfer.messages import (
    Announce,
    CancelSession,
    ChunkSent,
    Handoff,
    NoDecode,
    PrefixFound,
    Pull,
    PullDeclined,
    SenderFailed,
)
from transfer.outcome import Outcome
from transfer.session import SessionState, Transitions, ignore
from transfer.session_events import (
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    GrantRequested,
    PagesReady,
    PeerDied,
    PeerLost,
    PostEnded,
    PullRequested,
)
from transfer.wire import pack_ints


class PullSession(GenerationSession):
    """Fills the pages of a prefix from one rank of another instance."""

    @override
    def _transitions(self) -> Transitions:
        return PULL_TRANSITIONS

    def _on_pull_requested(self, event: PullRequested) -> None:
        self._request_deadline_ms = self._now_ms + event.deadline_ms
        self._send(
            Pull(
                request_id=self.request_id,
                session=self.session,
                scope=event.prefix.scope,
                tokens=pack_ints(event.prefix.tokens),
                least_blocks=event.least_blocks,
                deadline_ms=event.deadline_ms,
                receivers=event.receivers,
            )
        )
        self.state = SessionState.ASKED

    def _on_found(self, event: PrefixFound) -> None:
        self._report(PrefixFoundReceived(self.request_id, event.end_block))
        self.state = SessionState.ANNOUNCED

    def _on_declined(self, event: PullDeclined) -> None:
        """Nothing went wrong: the session is over with no block moved."""
        self._peer_done = True
        self._decide(Outcome.SUCCEEDED, f"declined: {event.reason}")

    def _on_declined_late(self, _event: PullDeclined) -> None:
        self._peer_done = True


_S = SessionState
_P = PullSession
_OPENING: Final = frozenset({_S.NEW, _S.GRANTED})
_GRANTED_ONLY: Final = frozenset({GrantRequested, Announce, NoDecode})
PULL_TRANSITIONS: Final[Transitions] = {
    **{
        (state, event): handler
        for (state, event), handler in GENERATION_TRANSITIONS.items()
        if state not in _OPENING and event not in _GRANTED_ONLY
    },
    (_S.NEW, PullRequested): _P._on_pull_requested,
    (_S.NEW, CancelRequested): _P._on_cancel_requested,
    (_S.NEW, FailureReported): _P._on_failure,
    (_S.NEW, PeerLost): _P._on_peer_lost,
    (_S.NEW, PeerDied): _P._on_peer_died,
    (_S.ASKED, PrefixFound): _P._on_found,
    (_S.ASKED, PullDeclined): _P._on_declined,
    (_S.ASKED, SenderFailed): _P._on_sender_failed,
    (_S.ASKED, CancelSession): _P._on_cancel_session,
    (_S.ASKED, CancelRequested): _P._on_cancel_requested,
    (_S.ASKED, FailureReported): _P._on_failure,
    (_S.ASKED, PeerLost): _P._on_peer_lost,
    (_S.ASKED, PeerDied): _P._on_peer_died,
    (_S.ASKED, DeadlinePassed): _P._on_deadline,
    # The answer again.
    **{(state, PrefixFound): ignore for state in (_S.ANNOUNCED, _S.RECEIVING, _S.COMPLETING)},
    # Cancelled while the answer was on its way.
    (_S.CLOSING, PrefixFound): ignore,
    (_S.CLOSING, PullDeclined): _P._on_declined_late,
    (_S.CLOSED, PrefixFound): ignore,
    (_S.CLOSED, PullDeclined): ignore,
}
_MESSAGES: Final = frozenset(
    {PrefixFound, PullDeclined, ChunkSent, Handoff, SenderFailed, CancelSession}
)
PULL_IMPOSSIBLE: Final[Mapping[SessionState, frozenset[type]]] = {
    # The pull has not been sent: the peer does not know this session.
    _S.NEW: _MESSAGES | {PagesReady, PostEnded, DeadlinePassed},
    # Pages are given after the answer, bytes and handoff come after the pages.
    _S.ASKED: frozenset({PullRequested, PagesReady, PostEnded, ChunkSent, Handoff}),
    # What was found is not declined.
    **{
        state: (GENERATION_IMPOSSIBLE[state] - _GRANTED_ONLY) | {PullRequested, PullDeclined}
        for state in (_S.ANNOUNCED, _S.RECEIVING, _S.COMPLETING)
    },
    _S.CLOSING: frozenset({PullRequested, PagesReady}),
    # The connection is gone, and with it its messages.
    _S.DOUBT: _MESSAGES | {PullRequested, PagesReady},
    _S.CLOSED: frozenset({PullRequested}),
}
"""Pairs that raise InvalidTransition; with the transitions they make up every pair."""
