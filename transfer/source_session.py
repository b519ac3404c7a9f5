"""The sending end of a prefix pull: another opening of a :class:`ContextSession`.

pull -> found -> ready -> the one chunk posted -> handoff -> received, or pull -> declined. All that
is shipped was computed long ago and is leased before the answer goes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from transfer.agent_events import PullReceived
from transfer.context_session import CONTEXT_IMPOSSIBLE, CONTEXT_TRANSITIONS, ContextSession
from transfer.messages import (
    CancelSession,
    Grant,
    PrefixFound,
    Pull,
    PullDeclined,
    Received,
    ReceiveReady,
)
from transfer.outcome import Outcome
from transfer.prefix import Prefix
from transfer.session import SessionState, Transitions, ignore
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    DeadlinePassed,
    DeclineRequested,
    FailureReported,
    FoundRequested,
    HandOffRequested,
    NoDecodeRequested,
    PeerDied,
    PeerLost,
    PostEnded,
    ShipRequested,
)
from transfer.wire import FrameError, unpack_ints


class SourceSession(ContextSession):
    """Delivers the pages of a cached prefix to one rank of another instance."""

    @override
    def _transitions(self) -> Transitions:
        return SOURCE_TRANSITIONS

    def _on_pull(self, event: Pull) -> None:
        self._request_deadline_ms = self._now_ms + event.deadline_ms
        self.state = SessionState.ASKED
        try:
            prefix = Prefix(event.scope, unpack_ints(event.tokens))
        except FrameError as error:
            self._break_off(str(error))
            return
        self._report(PullReceived(self.request_id, self.peer, prefix, event.least_blocks))

    @override
    def _waits_for_peer(self) -> bool:
        """From the answer on pages are leased, and no longer than this side allows."""
        waiting = (SessionState.ANNOUNCED, SessionState.COMPUTED, SessionState.HANDED_OFF)
        return self.state in waiting

    def _on_found(self, event: FoundRequested) -> None:
        self._progress_ms = self._now_ms
        self._send(PrefixFound(session=self.session, end_block=event.end_block))
        self.state = SessionState.ANNOUNCED

    def _on_decline(self, event: DeclineRequested) -> None:
        self._send(PullDeclined(session=self.session, reason=event.reason))
        self._decide(Outcome.SUCCEEDED, f"declined: {event.reason}")


_S = SessionState
_R = SourceSession
_OPENING: Final = frozenset({_S.NEW, _S.GRANTED})
_GRANTED_ONLY: Final = frozenset({Grant, AnnounceRequested, NoDecodeRequested})
_DECIDED: Final = (_S.CLOSING, _S.DOUBT, _S.CLOSED)
SOURCE_TRANSITIONS: Final[Transitions] = {
    **{
        (state, event): handler
        for (state, event), handler in CONTEXT_TRANSITIONS.items()
        if state not in _OPENING and event not in _GRANTED_ONLY
    },
    (_S.NEW, Pull): _R._on_pull,
    (_S.NEW, CancelRequested): _R._on_cancel_requested,
    (_S.NEW, FailureReported): _R._on_failure,
    (_S.NEW, PeerLost): _R._on_peer_lost,
    (_S.NEW, PeerDied): _R._on_peer_died,
    (_S.ASKED, FoundRequested): _R._on_found,
    (_S.ASKED, DeclineRequested): _R._on_decline,
    (_S.ASKED, CancelSession): _R._on_cancel_session,
    (_S.ASKED, CancelRequested): _R._on_cancel_requested,
    (_S.ASKED, FailureReported): _R._on_failure,
    (_S.ASKED, PeerLost): _R._on_peer_lost,
    (_S.ASKED, PeerDied): _R._on_peer_died,
    (_S.ASKED, DeadlinePassed): _R._on_deadline,
    **{
        (state, Pull): ignore
        for state in SessionState
        if state not in (_S.NEW, _S.GRANTED, _S.RECEIVING, _S.COMPLETING)
    },
    # The engine may answer what has been given up meanwhile.
    **{
        (state, event): ignore for state in _DECIDED for event in (FoundRequested, DeclineRequested)
    },
}
SOURCE_IMPOSSIBLE: Final[Mapping[SessionState, frozenset[type]]] = {
    # A session starts with the pull.
    _S.NEW: frozenset(
        {
            *(FoundRequested, ShipRequested, HandOffRequested, DeclineRequested),
            *(ReceiveReady, Received, CancelSession, PostEnded, DeadlinePassed),
        }
    ),
    # Pages follow the answer, and the receiver answers only that.
    _S.ASKED: frozenset({ReceiveReady, Received, ShipRequested, HandOffRequested, PostEnded}),
    # A pull is answered once.
    **{
        state: (CONTEXT_IMPOSSIBLE[state] - _GRANTED_ONLY) | {FoundRequested, DeclineRequested}
        for state in (_S.ANNOUNCED, _S.COMPUTED, _S.SHIPPING, _S.HANDED_OFF)
    },
    **{state: frozenset() for state in _DECIDED},
}
"""Pairs that raise InvalidTransition; with the transitions they make up every pair."""
