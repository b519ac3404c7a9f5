"""What an agent and its pairs are, around real requests, sessions and queues of posts: it routes by
session id, carries out commands in order, and knows nothing of the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from typing_extensions import override

from kvcache_core.lease import PageLease
from tests.sim.transfer_endpoint import SimEndpoint
from tests.sim.transfer_memory import StampedMemory
from tests.sim.transfer_network import Link
from tests.sim.transfer_process import Process
from tests.sim.transfer_terrain import Site
from transfer.agent_config import AgentConfig
from transfer.agent_counters import TransferCounters
from transfer.agent_events import AgentEvent, LeaseEnded, SessionEnded
from transfer.agent_pair import Pair, Side
from transfer.agent_peers import PeerConnector
from transfer.agent_requests import RequestBook, RunningRequest
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.grants_in import GrantsIn
from transfer.grants_out import GrantsOut, Order
from transfer.identity import Incarnation, RankId
from transfer.leased_pages import LeasedPages
from transfer.messages import Grant, HandoffData, Pull, SessionMessage
from transfer.outcome import Outcome, PeerFate, PostStatus
from transfer.pair_posts import PairPosts, Schedule
from transfer.peers import granters_to
from transfer.pending import EndedSessions, PendingCancels
from transfer.plan import TransferPlan
from transfer.post_order import PostOrder
from transfer.rank_info import RankInfo
from transfer.region import Post
from transfer.request_transfer import LocalEvent, RequestTransfer
from transfer.session import Session, SessionState
from transfer.session_commands import (
    ArmDeadline,
    Command,
    DropPeer,
    PostReceives,
    PostSends,
    Report,
    SendControl,
)
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
)
from transfer.transport import Completion

LIMITS = TransferLimits(floor_ms=600, least_bytes_per_ms=100, drain_ms=400)
FAILURES = ("fail",)
"""Why requests fail here: because the test says so."""
DIFFER = "ranks of the source found"
"""Or because sources in the same place, which match their caches each on its own here, differ."""
LATE_MS = 500
"""A timer that is held up with its process waits this long for what has come meanwhile."""


@dataclass(frozen=True, eq=False)
class Handled:
    """One event that a session has taken."""

    process: Process
    session: Session
    event: object
    before: SessionState


@dataclass(frozen=True, eq=False)
class Stray:
    """A message that came for a session that is not there any more."""

    process: Process
    message: SessionMessage


Watch = Callable[[Handled | Stray], None]
Tell = Callable[[Handled], None]


class SimPair:
    """One end of a link with its sessions: what ``transfer.agent_pair`` is."""

    def __init__(self, agent: SimAgent, link: Link, peer: RankInfo, plan: TransferPlan) -> None:
        self.agent = agent
        self.link = link
        self.peer = peer
        self.incarnation = peer.incarnation
        self.plan = plan
        self.granters = len(granters_to(peer, agent.instance, 0))
        self.process = agent.process
        self.side = (Side.CONTEXT, Side.GENERATION)[self.process.side]
        self.sessions: dict[str, Session] = {}
        self.armed: dict[str, int] = {}
        """When the timer of each session rings."""
        self.posts = PairPosts(
            plan=plan,
            memory=agent.memory,
            counters=TransferCounters(),
            schedule=Schedule(lambda: self.process.clock.now_ms / 1000, self.process.soon),
            over=self._post_over,
        )
        self.posts.bind(SimEndpoint(link, self.process, self._check_buffer))
        self._order = PostOrder()
        self._told = False
        self._broken: list[tuple[Session, Post, Completion]] = []

    @property
    def open(self) -> bool:
        """Whether new sessions may start."""
        return self.link.open[self.process.side]

    @property
    def lost(self) -> bool:
        """Whether its sessions have been told that the link is lost."""
        return self._told

    @property
    def quiet(self) -> bool:
        """Whether this end is through with its link."""
        return self._told and self.posts.quiet.is_set()

    def received(self, message: SessionMessage) -> None:
        """A message of the peer; those of forgotten sessions are late and harmless."""
        if not self.open:
            return
        session = self.sessions.get(message.session)
        if session is not None:
            self.drive(session, message)
        elif isinstance(message, Grant | Pull):
            self.agent.grants_in.take(self.as_pair, message)
        else:
            for watch in self.agent.watches:
                watch(Stray(self.process, message))

    @property
    def as_pair(self) -> Pair:
        """For what is written for the agent's own pairs."""
        return cast(Pair, self)

    def add(self, session: Session) -> None:
        """A new session."""
        self.sessions[session.session] = session

    def send(self, message: SessionMessage) -> None:
        """A message of no session."""
        self.link.send(self.process.side, message)

    def refuse(self, *reasons: str) -> None:
        raise AssertionError(f"{self.process.name} refuses its peer: {reasons}")

    def drive(self, session: Session, event: object) -> None:
        """Let a session handle an event; carry out what it commands."""
        if isinstance(event, FailureReported):
            known = event.reason in FAILURES or event.reason in self.agent.reasons
            assert known or event.reason.startswith(DIFFER), f"used wrongly: {event.reason}"
        before = session.state
        commands = session.handle(event, self.process.clock.now_ms)
        handled = Handled(self.process, session, event, before)
        self.agent.told(handled)
        for command in commands:
            self._perform(session, command, event)
        if session.closed and self.sessions.pop(session.session, None) is not None:
            self.armed.pop(session.session, None)
            self.agent.closed(session)
        self._check(session)
        for watch in self.agent.watches:
            watch(handled)

    def link_closed(self, reason: str) -> None:
        """This end is closed; its data endpoint is a little later."""
        self.process.later(self.link.weather.teardown_ms, lambda: self._tear_down(reason))

    def peer_dead(self) -> None:
        """The peer's process is known dead, or through with this link."""
        self.posts.when_still(self._tell_death)

    def _tell_death(self) -> None:
        self.posts.peer_dead()
        for session in tuple(self.sessions.values()):
            self.drive(session, PeerDied())

    def _perform(self, session: Session, command: Command, cause: object) -> None:
        match command:
            case SendControl(message=message):
                self.link.send(self.process.side, message)
            case PostSends() | PostReceives():
                self._order.made(session.session, command.posts)
                self.posts.add(session, command)
            case Report(event=event):
                if isinstance(event, SessionEnded):
                    self.agent.reasons.add(event.reason)
                self.agent.book.heard(session, event, cause)
            case ArmDeadline(at_ms=at_ms):
                self._arm(session, at_ms)
            case DropPeer(reason=reason):
                self.agent.drops.append(reason)
                self.process.soon(lambda: self.link.close(self.process.side, reason))

    def _arm(self, session: Session, at_ms: int) -> None:
        self.armed[session.session] = at_ms
        wait_ms = max(at_ms - self.process.clock.now_ms, 0)
        self.process.clock.after(wait_ms, partial(self._ring, session, at_ms))

    def _ring(self, session: Session, at_ms: int) -> None:
        if self.armed.get(session.session) != at_ms or not self.process.alive:
            return
        if self.process.paused:
            self.process.run(lambda: self._arm(session, self.process.clock.now_ms + LATE_MS))
            return
        del self.armed[session.session]
        self.drive(session, DeadlinePassed(self._order.ahead_ms(session.session)))

    def _check(self, session: Session) -> None:
        """Nothing waits without a deadline, and what is over has none."""
        waits = session.state not in (SessionState.DOUBT, SessionState.CLOSED)
        assert session.session in self.armed or not waits, "nothing is armed"
        assert session.session not in self.armed or not session.closed, "still armed"

    def _check_buffer(self) -> None:
        """A staging buffer that a living peer may reach is kept."""
        assert self.incarnation in self.agent.dead or not self.posts.settled, "a buffer was let go"

    def _post_over(self, session: Session, post: Post, end: Completion) -> None:
        if end.status is not PostStatus.DONE and not self.open and not self._told:
            self._broken.append((session, post, end))
        else:
            self._end_post(session, post, end)

    def _end_post(self, session: Session, post: Post, end: Completion) -> None:
        self._order.ended(session.session, post.id, self.process.clock.now_ms)
        self.drive(session, PostEnded(post.id, end.status))

    def _tear_down(self, reason: str) -> None:
        self.link.torn_down[self.process.side] = True
        self.posts.when_still(lambda: self._tell_loss(reason))

    def _tell_loss(self, reason: str) -> None:
        is_dead = self.incarnation in self.agent.dead
        fate = PeerFate.DEAD if is_dead else PeerFate.UNKNOWN
        for session in tuple(self.sessions.values()):
            self.drive(session, PeerLost(reason, fate))
        if is_dead:
            self.posts.peer_dead()
        for session, post in self.posts.withdraw():
            self._end_post(session, post, Completion(PostStatus.REVOKED, reason))
        self._told = True
        broken, self._broken = self._broken, []
        for session, post, end in broken:
            self._end_post(session, post, end)


class SimBook(RequestBook):
    """Counts what begins."""

    started: Counter[str]

    @override
    def open(self, side: Side, core: RequestTransfer, prompt_tokens: int | None) -> RunningRequest:
        self.started[core.request_id] += 1
        return super().open(side, core, prompt_tokens)


class SimPeers(PeerConnector):
    """Connections that are there."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self.info = agent.info

    @override
    def open_pair(self, side: Side, peer: RankId) -> Pair | None:
        pair = self._agent.open_pair(peer)
        return pair.as_pair if pair is not None else None


class SimAgent:
    """Transfers of one process: the verbs of ``transfer.agent``."""

    def __init__(
        self,
        process: Process,
        memory: StampedMemory,
        site: Site,
        instance: Sequence[RankInfo],
        costs: TransferCosts,
        watches: list[Watch],
        told: Tell,
    ) -> None:
        self.process = process
        self.memory = memory
        self.info = site.info
        self.instance = instance
        self.watches = watches
        self.told = told
        self.pairs: list[SimPair] = []
        self.dead: set[Incarnation] = set()
        self.drops: list[str] = []
        self.reasons: set[str] = set()
        """Why sessions have ended: those beside them are told the same."""
        self.started: Counter[str] = Counter()
        """Requests, and grants that ended before, by request id."""
        self.dialling: set[str] = set()
        """Request ids whose grant waits for a connection."""
        self.forgotten: set[str] = set()
        """Ids of requests that are over."""
        self.deliver: Callable[[AgentEvent], None]
        self.book = SimBook(
            pages=LeasedPages(site.views),
            counters=TransferCounters(),
            deliver=lambda event: self.deliver(event),
            over=self._request_over,
        )
        self.book.started = self.started
        self._side = (Side.CONTEXT, Side.GENERATION)[process.side]
        self._cancels = PendingCancels()
        self._ended = EndedSessions()
        self.grants_in = GrantsIn(
            book=self.book,
            cancels=self._cancels,
            ended=self._ended,
            config=AgentConfig(host="", cluster_token="", limits=LIMITS, costs=costs),
        )
        self._grants_out = GrantsOut(
            peers=SimPeers(self),
            book=self.book,
            limits=LIMITS,
            unstarted=lambda request, outcome, why, _kind: self._end_unstarted(
                request, outcome, why
            ),
            now_s=lambda: process.clock.now_ms / 1000,
            draw=process.rng.getrandbits,
        )

    def session(self, request_id: str) -> Session | None:
        """The session of a request that is not over."""
        running = self.book.current(self._side, request_id)
        return running.sessions[0] if running is not None else None

    def dial(self, request_id: str) -> bool:
        """A grant begins; False when it was cancelled before."""
        reason = self._cancels.take(request_id)
        if reason is not None:
            self._end_unstarted(request_id, Outcome.CANCELLED, reason)
            return False
        self.dialling.add(request_id)
        return True

    def open(self, order: Order) -> None:
        """``grant`` and ``pull``: there is a connection to each of the order's ranks."""
        self.dialling.remove(order.request_id)
        self._grants_out.open(order)

    def open_pair(self, peer: RankId) -> SimPair | None:
        """The connection to a rank, if there is one."""
        mine = [pair for pair in self.pairs if pair.peer.rank_id == peer]
        return mine[-1] if mine and mine[-1].open else None

    def no_connection(self, request_id: str) -> None:
        """A grant whose deadline passed before there was a connection."""
        self.dialling.remove(request_id)
        self._end_unstarted(request_id, Outcome.FAILED, "no connection")

    def give(self, request_id: str, first_block: int, end_block: int, lease: PageLease) -> None:
        """``ready`` and ``ship``."""
        running = self.book.current(self._side, request_id)
        if running is None:
            self.deliver(LeaseEnded(request_id, lease))
        else:
            running.give(first_block, end_block, lease)

    def found(self, request_id: str, end_block: int) -> None:
        self._tell(request_id, FoundRequested(end_block))

    def decline(self, request_id: str, reason: str) -> None:
        self._tell(request_id, DeclineRequested(reason))

    def announce(self, request_id: str) -> None:
        self._tell(request_id, AnnounceRequested())

    def hand_off(self, request_id: str, data: HandoffData | None) -> None:
        self._tell(request_id, HandOffRequested(data))

    def no_decode(self, request_id: str) -> None:
        self._tell(request_id, NoDecodeRequested())

    def fail(self, request_id: str, reason: str) -> None:
        self._tell(request_id, FailureReported(reason))

    def cancel(self, request_id: str, reason: str) -> None:
        running = self.book.current(self._side, request_id)
        if request_id in self.dialling:
            self.dialling.remove(request_id)
            self._end_unstarted(request_id, Outcome.CANCELLED, reason)
        elif running is not None:
            running.tell(CancelRequested(reason))
        else:
            self._cancels.remember(request_id, reason)

    def peer_known_dead(self, incarnation: Incarnation) -> None:
        self.dead.add(incarnation)
        for pair in self.pairs:
            if pair.incarnation == incarnation and pair.open:
                pair.link.close(self.process.side, "peer died")
        for pair in self.pairs:
            if pair.incarnation == incarnation and pair.lost:
                pair.peer_dead()

    def closed(self, session: Session) -> None:
        """Nothing of a session is left."""
        self._ended.add(session.session)

    def _request_over(self, running: RunningRequest) -> None:
        self.forgotten.add(running.request_id)
        self._cancels.over(running.request_id)
        if running.side is Side.CONTEXT:
            self.grants_in.over(running)

    def _tell(self, request_id: str, event: LocalEvent) -> None:
        running = self.book.current(self._side, request_id)
        if running is not None:
            running.tell(event)

    def _end_unstarted(self, request_id: str, outcome: Outcome, reason: str) -> None:
        self.started[request_id] += 1
        self._cancels.over(request_id)
        self.deliver(SessionEnded(request_id, outcome, reason, 0, 0))
