"""Context side: grants that come in, and the sessions that they start. Prefix pulls come in alike.

Every generation rank that this rank sends to grants the request for itself and says how many do.
The engine hears of it when all have. One that comes after the request has ended without it is told
so at once, and never starts it again.
"""

from __future__ import annotations

import logging
from typing import Final

from transfer.agent_config import AgentConfig
from transfer.agent_pair import Pair, Side
from transfer.agent_requests import RequestBook, RunningRequest
from transfer.context_session import ContextSession
from transfer.messages import CancelSession, Grant, Pull, SenderFailed
from transfer.outcome import Outcome
from transfer.pending import EndedSessions, PendingCancels, Unfinished, UnfinishedGrants
from transfer.request_transfer import RequestTransfer
from transfer.session_events import CancelRequested
from transfer.source_session import SourceSession

logger = logging.getLogger(__name__)


class GrantsIn:
    """Starts context sessions of one rank."""

    def __init__(
        self,
        *,
        book: RequestBook,
        cancels: PendingCancels,
        ended: EndedSessions,
        config: AgentConfig,
    ) -> None:
        self._book: Final = book
        self._cancels: Final = cancels
        self._ended: Final = ended
        self._config: Final = config
        self._unfinished: Final = UnfinishedGrants()

    def take(self, pair: Pair, grant: Grant | Pull) -> None:
        """A grant of a session that this rank does not know."""
        if grant.session in self._ended:
            return
        if pair.side is not Side.CONTEXT:
            pair.refuse("protocol: only a generation rank may grant")
            return
        running = self._book.undecided(Side.CONTEXT, grant.request_id)
        if running is None:
            end = self._unfinished.take(grant.request_id, pair.peer.rank_id)
            if end is not None:
                self._turn_away(pair, grant, end.outcome, end.reason)
                return
            core = RequestTransfer(grant.request_id, grant.receivers)
            prompt_tokens = grant.prompt_tokens if isinstance(grant, Grant) else None
            running = self._book.open(Side.CONTEXT, core, prompt_tokens)
        else:
            reason = _unfit(running, pair, grant)
            if reason:
                logger.warning("grant of request %s: %s", grant.request_id, reason)
                self._turn_away(pair, grant, Outcome.CANCELLED, reason)
                return
        self._start(running, pair, grant)

    def over(self, running: RunningRequest) -> None:
        """Nothing is left of a context request."""
        ending, missing = running.core.ending, running.core.missing
        if ending is None or not missing:
            return
        granted = running.pairs
        self._unfinished.remember(
            running.request_id,
            Unfinished(
                granted[0].incarnation,
                frozenset(pair.peer.rank for pair in granted),
                missing,
                *ending,
            ),
        )

    def _start(self, running: RunningRequest, pair: Pair, grant: Grant | Pull) -> None:
        session_type = ContextSession if isinstance(grant, Grant) else SourceSession
        session = session_type(
            request_id=grant.request_id,
            session=grant.session,
            peer=pair.incarnation,
            plan=pair.plan,
            limits=self._config.limits,
            costs=self._config.costs,
        )
        running.join(pair, session)
        pair.drive(session, grant)
        if grant.receivers != running.core.expected:
            running.fail(
                f"ranks of {pair.incarnation} disagree whether {running.core.expected} or "
                f"{grant.receivers} of them receive from this rank"
            )
        reason = self._cancels.take(grant.request_id)
        if reason is not None:
            running.tell(CancelRequested(reason))

    def _turn_away(self, pair: Pair, grant: Grant | Pull, outcome: Outcome, reason: str) -> None:
        self._ended.add(grant.session)
        if outcome is Outcome.CANCELLED:
            pair.send(CancelSession(session=grant.session, reason=reason))
        else:
            pair.send(SenderFailed(session=grant.session, reason=reason))


def _unfit(running: RunningRequest, pair: Pair, grant: Grant | Pull) -> str:
    """Why this is no further grant of a running request; empty when it is one."""
    pairs = running.pairs
    if (running.prompt_tokens is None) != isinstance(grant, Pull):
        return "this id is that of a transfer of another kind"
    if running.core.ending is not None:
        return running.core.ending[1]
    if pairs[0].incarnation != pair.incarnation:
        return f"this request has a session with {pairs[0].incarnation} already"
    if any(other.peer.rank == pair.peer.rank for other in pairs) or running.has(grant.session):
        return "this request has a session already"
    if not running.core.missing:
        return f"this request has its {running.core.expected} sessions already"
    return ""
