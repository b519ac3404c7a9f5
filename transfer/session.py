"""What both ends of a transfer have in common: dispatch, outcome, leases, deadlines.

A session is sans-IO: ``handle(event, now_ms)`` returns commands and touches nothing. What may
happen in which state is a table; a pair that is not in it raises. The outcome is decided once and
reported at once; leases are given back on their own account, when the last access is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from transfer.agent_events import AgentEvent, LeaseEnded, LeaseInDoubt, SessionEnded
from transfer.deadlines import TransferLimits
from transfer.identity import Incarnation
from transfer.lease import TransferLease
from transfer.messages import SessionMessage
from transfer.outcome import Access, Outcome, PeerFate
from transfer.plan import TransferPlan
from transfer.post_ledger import PostLedger
from transfer.region import Piece, Post
from transfer.session_commands import ArmDeadline, Command, DropPeer, Report, SendControl
from transfer.session_events import DeadlinePassed, PeerDied, PeerLost, PostEnded
from transfer.story import InvalidTransition, Story


class SessionState(Enum):
    """Where a session stands. The last three are common to both ends."""

    NEW = "new"
    GRANTED = "granted"
    ASKED = "asked"
    """Pull: whether the source has the prefix is not known yet. In place of GRANTED."""
    ANNOUNCED = "announced"
    COMPUTED = "computed"
    """Context: all is computed, the receiver's pages are not known yet."""
    SHIPPING = "shipping"
    HANDED_OFF = "handed off"
    RECEIVING = "receiving"
    COMPLETING = "completing"
    """Generation: the handoff is in, some bytes are not."""
    CLOSING = "closing"
    """The outcome is decided, a lease is not over."""
    DOUBT = "doubt"
    """As CLOSING, but only proof of the peer's death can end what is left."""
    CLOSED = "closed"
    """Outcome decided, every lease over: the session may be forgotten."""


Handler = Callable[[Any, Any], None]
Transitions = Mapping[tuple[SessionState, type], Handler]
CLOSING_STATES: Final = (SessionState.CLOSING, SessionState.DOUBT, SessionState.CLOSED)


class Session(ABC):
    """One end of one request's transfer."""

    def __init__(
        self,
        *,
        request_id: str,
        session: str,
        peer: Incarnation,
        plan: TransferPlan,
        limits: TransferLimits,
    ) -> None:
        self.request_id: Final = request_id
        self.session: Final = session
        self.peer: Final = peer
        self.state = SessionState.NEW
        self.outcome = Outcome.PENDING
        self._plan: Final = plan
        self._limits: Final = limits
        self._ledger: Final = PostLedger()
        self._story: Final = Story()
        self._commands: list[Command] = []
        self._now_ms = 0
        self._request_deadline_ms: int | None = None
        self._progress_ms = 0
        self._armed_ms: int | None = None
        self._peer_dropped = False
        self._fate: PeerFate | None = None
        self._moved_blocks = 0

    @property
    def access(self) -> Access:
        """Whether leased pages may still be touched."""
        return self._ledger.access

    @property
    def closed(self) -> bool:
        """Whether the shell may forget this session."""
        return self.state is SessionState.CLOSED

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first."""
        return self._story.entries()

    def handle(self, event: object, now_ms: int) -> tuple[Command, ...]:
        """Take one event, answer with commands to carry out in order.

        Raises InvalidTransition, with nothing changed, for an event that cannot happen here.
        """
        handler = self._transitions().get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(self.session, self.state, event, self._story.entries())
        before = self.state
        self._now_ms = now_ms
        self._commands = []
        handler(self, event)
        self._settle()
        self._arm()
        self._story.add(
            f"{now_ms} ms: {before.name} {type(event).__name__} -> {self.state.name}, "
            f"{self.outcome.name}, {self._ledger.open_posts} open"
        )
        return tuple(self._commands)

    @abstractmethod
    def _transitions(self) -> Transitions:
        """The table of this end."""

    @abstractmethod
    def _last_word(self, outcome: Outcome, reason: str) -> None:
        """Tell the peer that this end gave up."""

    @abstractmethod
    def _peer_may_write(self) -> bool:
        """Whether the peer may still ask for posts although the outcome is decided."""

    @abstractmethod
    def _waits_for_peer(self) -> bool:
        """Whether an open session waits for the peer alone, so that silence counts."""

    def _send(self, message: SessionMessage) -> None:
        if self._fate is None:
            self._commands.append(SendControl(message))

    def _report(self, event: AgentEvent) -> None:
        self._commands.append(Report(event))

    def _decide(self, outcome: Outcome, reason: str) -> None:
        """Set and report the outcome; the first one stays."""
        if self.outcome is not Outcome.PENDING:
            return
        self.outcome = outcome
        self._progress_ms = self._now_ms
        self.state = SessionState.CLOSING
        # What was posted for a success has arrived, or will: our own completions may lag behind.
        succeeded = outcome is Outcome.SUCCEEDED
        moved_bytes = self._ledger.posted_bytes if succeeded else self._ledger.moved_bytes
        self._report(
            SessionEnded(self.request_id, outcome, reason, moved_bytes, self._moved_blocks)
        )

    def _give_up(self, outcome: Outcome, reason: str) -> None:
        """End the request from this side and tell the peer, unless it has ended already."""
        if self.outcome is not Outcome.PENDING:
            return
        self._last_word(outcome, reason)
        self._decide(outcome, reason)

    def _break_off(self, reason: str) -> None:
        """The peer or the transport broke the rules: only a new connection helps."""
        self._give_up(Outcome.FAILED, reason)
        self._drop_peer(reason)

    def _post(self, lease: TransferLease, pieces: list[tuple[Piece, int]]) -> tuple[Post, ...]:
        """Book posts; the clock of progress starts when nothing else was under way."""
        if not self._ledger.open_posts:
            self._progress_ms = self._now_ms
        return self._ledger.post(lease, pieces)

    def _drop_peer(self, reason: str) -> None:
        if self._fate is None and not self._peer_dropped:
            self._peer_dropped = True
            self._commands.append(DropPeer(f"session {self.session}: {reason}"))

    def _settle(self) -> None:
        """Give back the leases that are over and find the closing state."""
        if self.outcome is not Outcome.PENDING and not self._peer_may_write():
            self._ledger.retire_all()
        for lease, access in self._ledger.settle(self._fate):
            if access is Access.ENDED:
                self._report(LeaseEnded(self.request_id, lease))
            else:
                self._report(
                    LeaseInDoubt(
                        self.request_id,
                        lease,
                        f"peer {self.peer} is lost and not known dead",
                    )
                )
        if self.outcome is Outcome.PENDING:
            return
        if self._ledger.settled:
            self.state = SessionState.CLOSED
        elif self._ledger.doubtful:
            self.state = SessionState.DOUBT
        else:
            self.state = SessionState.CLOSING

    def _due_ms(self) -> int | None:
        """When the current deadline passes, or None when there is none."""
        if self.state is SessionState.CLOSING:
            return self._progress_ms + self._limits.draining_ms(self._ledger.open_bytes)
        if self.state in CLOSING_STATES or self._request_deadline_ms is None:
            return None
        if self._ledger.open_posts or self._waits_for_peer():
            silence = self._progress_ms + self._limits.progress_ms(self._ledger.open_bytes)
            return min(self._request_deadline_ms, silence)
        return self._request_deadline_ms

    def _arm(self) -> None:
        """Arm where the armed deadline would come too late; too early a one re-arms itself."""
        due = self._due_ms()
        if due is not None and (self._armed_ms is None or due < self._armed_ms):
            self._armed_ms = due
            self._commands.append(ArmDeadline(due))

    def _on_deadline(self, event: DeadlinePassed) -> None:
        self._armed_ms = None
        if self._ledger.open_posts:
            # While those ahead of them end, our posts are not stuck.
            self._progress_ms = max(self._progress_ms, event.ahead_ms)
        due = self._due_ms()
        if due is None or self._now_ms < due:
            return
        if self.state is not SessionState.CLOSING:
            self._give_up(Outcome.FAILED, f"deadline passed in state {self.state.value}")
        elif self._fate is None and not self._peer_dropped:
            self._progress_ms = self._now_ms
            self._drop_peer("drain deadline passed")
        else:
            self._fate = self._fate or PeerFate.UNKNOWN
            self._ledger.give_up()

    def _on_peer_lost(self, event: PeerLost) -> None:
        self._lose(event.fate, event.reason)

    def _on_peer_died(self, _event: PeerDied) -> None:
        self._lose(PeerFate.DEAD, f"peer {self.peer} died")

    def _lose(self, fate: PeerFate, reason: str) -> None:
        if self._fate is not PeerFate.DEAD:
            self._fate = fate
        self._progress_ms = self._now_ms
        self._decide(Outcome.FAILED, reason)

    def _on_drained(self, event: PostEnded) -> None:
        """A post ended after the outcome was decided."""
        self._progress_ms = self._now_ms
        self._ledger.end(event.post, event.status)


def ignore(_session: Session, _event: object) -> None:
    """Handler of what is late or repeated, and harmless."""
