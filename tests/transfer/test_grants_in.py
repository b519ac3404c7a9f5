"""Grants of several receivers at a context rank: who is taken, who is turned away, and why."""

from __future__ import annotations

from typing_extensions import override

from tests.transfer.agent_rig import FAST, TOKEN, VIEWS, ArrayMemory, Engine, rank_info
from transfer.agent_config import AgentConfig
from transfer.agent_counters import TransferCounters
from transfer.agent_events import AgentEvent, GrantReceived, SessionEnded
from transfer.agent_pair import Pair, PairOwner, Route, Side
from transfer.agent_requests import RequestBook
from transfer.grants_in import GrantsIn
from transfer.identity import Incarnation
from transfer.inprocess import Network
from transfer.leased_pages import LeasedPages
from transfer.messages import CancelSession, Grant, Pull, SenderFailed, SessionMessage
from transfer.outcome import Outcome
from transfer.pending import EndedSessions, PendingCancels
from transfer.plan import TransferPlan
from transfer.session import Session

CONTEXT = rank_info("context")


class Heard(Pair):
    """A pair without a link that keeps what it would send of itself."""

    sent: tuple[SessionMessage, ...] = ()

    @override
    def send(self, message: SessionMessage) -> None:
        self.sent += (message,)


class Desk(PairOwner):
    """The context half of an agent."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.cancels = PendingCancels()
        self.ended = EndedSessions()
        self.counters = TransferCounters()
        self.book = RequestBook(
            pages=LeasedPages(VIEWS),
            counters=self.counters,
            deliver=self.engine,
            over=lambda running: self.grants.over(running),
        )
        self.grants = GrantsIn(
            book=self.book,
            cancels=self.cancels,
            ended=self.ended,
            config=AgentConfig(host="h", cluster_token=TOKEN, timing=FAST),
        )
        self._generation = Incarnation.mint("generation")

    def pair(self, rank: int, incarnation: Incarnation | None = None) -> Heard:
        """With a rank of the generation instance."""
        peer = rank_info("generation").model_copy(
            update={"incarnation": incarnation or self._generation, "rank": rank}
        )
        return Heard(
            side=Side.CONTEXT,
            peer=peer,
            route=Route(TransferPlan.between(CONTEXT, peer)),
            transport=Network().transport("a"),
            memory=ArrayMemory(4),
            owner=self,
            counters=self.counters,
        )

    def grant(self, pair: Pair, session: str, receivers: int = 2) -> None:
        """A grant of request ``r`` comes."""
        self.grants.take(
            pair,
            Grant(
                request_id="r",
                session=session,
                prompt_tokens=16,
                deadline_ms=9_000,
                receivers=receivers,
            ),
        )

    def outcomes(self) -> list[tuple[Outcome, str]]:
        return [(end.outcome, end.reason) for end in self.engine.of(SessionEnded, "r")]

    @override
    def reported(self, session: Session, event: AgentEvent, cause: object) -> None:
        self.book.heard(session, event, cause)

    @override
    def opened(self, pair: Pair, opening: Grant | Pull) -> None:
        self.grants.take(pair, opening)

    @override
    def session_closed(self, pair: Pair, session: Session) -> None:
        self.ended.add(session.session)

    @override
    def pair_bound(self, pair: Pair) -> None:
        """Not of interest."""

    @override
    def pair_lost(self, pair: Pair, reason: str) -> None:
        """Not of interest."""

    @override
    def known_dead(self, incarnation: Incarnation) -> bool:
        return False


async def test_the_engine_hears_of_a_request_when_all_have_granted() -> None:
    desk = Desk()
    desk.grant(desk.pair(0), "s0")
    assert not desk.engine.events
    desk.grant(desk.pair(1), "s1")
    assert len(desk.engine.of(GrantReceived, "r")) == 1


async def test_receivers_that_count_themselves_differently_fail_the_request() -> None:
    desk = Desk()
    desk.grant(desk.pair(0), "s0", receivers=3)
    desk.grant(desk.pair(1), "s1", receivers=2)
    ((outcome, reason),) = desk.outcomes()
    assert (outcome, "disagree" in reason) == (Outcome.FAILED, True)
    assert not desk.engine.of(GrantReceived, "r")
    late = desk.pair(2)
    desk.grant(late, "s2", receivers=3)
    assert late.sent == (SenderFailed(session="s2", reason=reason),)
    assert len(desk.outcomes()) == 1


async def test_grants_beside_a_running_request_are_turned_away() -> None:
    desk = Desk()
    first = desk.pair(0)
    desk.grant(first, "s0")
    stranger = desk.pair(1, Incarnation.mint("generation"))
    for pair, session, why in (
        (first, "again", "has a session already"),
        (desk.pair(1), "s0", "has a session already"),
        (stranger, "strange", "has a session with generation@"),
    ):
        desk.grant(pair, session)
        assert isinstance(pair, Heard)
        (message,) = pair.sent
        assert isinstance(message, CancelSession)
        assert why in message.reason
    desk.grant(desk.pair(1), "s1")
    third = desk.pair(2)
    desk.grant(third, "s2")
    (message,) = third.sent
    assert isinstance(message, CancelSession)
    assert "2 sessions" in message.reason
    assert len(desk.engine.of(GrantReceived, "r")) == 1


async def test_a_remembered_cancellation_ends_the_first_grant_and_those_to_come() -> None:
    desk = Desk()
    desk.cancels.remember("r", "gone")
    desk.grant(desk.pair(0), "s0")
    late = desk.pair(1)
    desk.grant(late, "s1")
    assert late.sent == (CancelSession(session="s1", reason="gone"),)
    assert desk.book.all == ()
    assert desk.outcomes() == [(Outcome.CANCELLED, "gone")]
