"""One peer in one direction: its link, its data endpoint, and the sessions that run over them.

Carries out what sessions command and tells them what happened, in that order of importance:
posts are made in the order commanded, every post is told as ended exactly once, and the loss of the
peer is told before the posts that it broke. A lost pair is never revived; it stays until its last
session is closed and no staging buffer is in doubt.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Protocol, assert_never

from transfer.agent_counters import TransferCounters
from transfer.agent_events import AgentEvent
from transfer.control import ControlLink
from transfer.identity import Incarnation
from transfer.messages import Grant, Pull, SessionMessage
from transfer.outcome import PeerFate, PostStatus
from transfer.pair_posts import PairPosts, Schedule
from transfer.plan import TransferPlan
from transfer.post_order import PostOrder
from transfer.rank_info import RankInfo
from transfer.region import Post
from transfer.session import Session
from transfer.session_commands import (
    ArmDeadline,
    Command,
    DropPeer,
    PostReceives,
    PostSends,
    Report,
    SendControl,
)
from transfer.session_events import DeadlinePassed, PeerDied, PeerLost, PostEnded
from transfer.story import InvalidTransition
from transfer.transport import Completion, Endpoint, PageMemory, Transport, main_lane

logger = logging.getLogger(__name__)

LATE_S: Final = 0.5
"""A deadline's timer that fires later than this was held up with the whole process."""


class Side(Enum):
    """Which end of its pairs' transfers this process is."""

    CONTEXT = "context"
    GENERATION = "generation"


class PairOwner(Protocol):
    """What a pair tells the agent, in the loop."""

    def reported(self, session: Session, event: AgentEvent, cause: object) -> None:
        """What a session reports when it is told ``cause``."""

    def opened(self, pair: Pair, opening: Grant | Pull) -> None:
        """A generation rank grants a request (context side), or a rank pulls a prefix."""

    def session_closed(self, pair: Pair, session: Session) -> None:
        """Nothing of this session is left."""

    def pair_bound(self, pair: Pair) -> None:
        """Its data endpoint is there."""

    def pair_lost(self, pair: Pair, reason: str) -> None:
        """The pair is of no further use; its sessions have been told."""

    def known_dead(self, incarnation: Incarnation) -> bool:
        """Whether somebody who can know has said that this process is dead."""


@dataclass(frozen=True, slots=True)
class Route:
    """What is worked out once a peer: the plan of the pair, and on the generation side how many
    ranks of this instance grant requests to the peer; 0 where this rank does not.
    """

    plan: TransferPlan
    granters: int = 0


class Pair:
    """Made when the handshake is over; the link is given right after."""

    def __init__(
        self,
        *,
        side: Side,
        peer: RankInfo,
        route: Route,
        transport: Transport,
        memory: PageMemory,
        owner: PairOwner,
        counters: TransferCounters,
    ) -> None:
        self.side: Final = side
        self.peer: Final = peer
        self.plan: Final = route.plan
        self.granters: Final = route.granters
        self.bound: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        """Done when the data endpoint is there; failed when the pair was lost before."""
        self.torn_down: Final = asyncio.Event()
        self._transport = transport
        self._owner = owner
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._posts = PairPosts(
            plan=route.plan,
            memory=memory,
            counters=counters,
            schedule=Schedule(self._loop.time, self._loop.call_soon),
            over=self._post_ended,
        )
        self._order = PostOrder()
        self._link: ControlLink | None = None
        self._endpoint: Endpoint | None = None
        self._sessions: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._broken: list[tuple[Session, int, PostStatus]] = []
        self._losing: asyncio.Task[None] | None = None
        # A failed pair is seen by its sessions too; nobody has to await this.
        self.bound.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def incarnation(self) -> Incarnation:
        """Whom this pair is with."""
        return self.peer.incarnation

    @property
    def open(self) -> bool:
        """Whether new sessions may start."""
        return self._link is not None and self._link.open and self._losing is None

    @property
    def lanes(self) -> tuple[str, ...]:
        """Transports in use; empty before the endpoint is bound."""
        return self._endpoint.lanes if self._endpoint is not None else ()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Sessions that are not closed."""
        return tuple(self._sessions.values())

    @property
    def staging_bytes(self) -> int:
        """Memory of its staging buffers."""
        return self._posts.staging_bytes

    @property
    def settled(self) -> bool:
        """Whether a lost pair may be forgotten: no session is left, no request, no doubt."""
        return not self._sessions and self._posts.settled

    async def quiet(self) -> None:
        """Wait until the pair is torn down and every request posted on it has ended."""
        await self.torn_down.wait()
        await self._posts.quiet.wait()

    def attach(self, link: ControlLink) -> None:
        """Give the link."""
        self._link = link

    def bind(self, endpoint: Endpoint) -> None:
        """Give the data endpoint; posts that waited for it are made now."""
        if self._losing is not None:
            self._loop.create_task(self._transport.close_endpoint(endpoint))
            return
        self._endpoint = endpoint
        logger.info(
            "pages of %s travel over %s (lanes: %s)",
            self.peer.rank_id,
            main_lane(endpoint.lanes),
            ", ".join(endpoint.lanes),
        )
        endpoint.on_lost(lambda reason: self.drop(f"data endpoint: {reason}"))
        self.bound.set_result(None)
        self._posts.bind(endpoint)
        self._owner.pair_bound(self)

    def send(self, message: SessionMessage) -> None:
        """A message of no session."""
        if self._link is not None:
            self._link.send(message)

    def refuse(self, *reasons: str) -> None:
        """Tell the peer why, then lose it."""
        if self._link is not None:
            self._link.refuse(*reasons)

    def drop(self, reason: str) -> None:
        """Lose the peer from this side."""
        if self._link is not None:
            self._link.end(reason)

    def add(self, session: Session) -> None:
        """A new session."""
        self._sessions[session.session] = session
        self._counters.sessions_total += 1
        self._counters.sessions_in_flight += 1

    def received(self, message: SessionMessage) -> None:
        """A message of the peer; those of forgotten sessions are late and harmless."""
        if isinstance(message, Grant | Pull) and message.session not in self._sessions:
            self._owner.opened(self, message)
            return
        session = self._sessions.get(message.session)
        if session is None:
            return
        try:
            commands = session.handle(message, self._now_ms())
        except InvalidTransition as error:
            self.refuse(f"protocol: {error}")
        else:
            self._carry_out(session, message, commands)

    def drive(self, session: Session, event: object) -> None:
        """Tell a session something that happened on this side.

        Raises InvalidTransition or ValueError, with nothing changed, for what may not happen.
        """
        self._carry_out(session, event, session.handle(event, self._now_ms()))

    def link_ended(self, reason: str) -> None:
        """The link's one end."""
        self._losing = self._loop.create_task(self._lose(reason))

    def peer_dead(self) -> None:
        """The peer's process is known dead, or has said that it is through with this pair. Its
        sessions hear of it when no pass touches their pages any more.
        """
        self._posts.when_still(self._tell_death)

    def _tell_death(self) -> None:
        self._posts.peer_dead()
        for session in self.sessions:
            self.drive(session, PeerDied())

    async def _lose(self, reason: str) -> None:
        if not self.bound.done():
            self.bound.set_exception(ConnectionError(reason))
        if self._sessions:
            logger.warning(
                "lost %s with %d sessions: %s", self.peer.rank_id, len(self._sessions), reason
            )
        try:
            if self._endpoint is not None:
                await self._transport.close_endpoint(self._endpoint)
        finally:
            # A session whose peer is dead gives its pages back at once.
            self._posts.when_still(partial(self._tear_down, reason))

    def _tear_down(self, reason: str) -> None:
        try:
            self._tell_loss(reason)
        finally:
            self.torn_down.set()
            self._owner.pair_lost(self, reason)

    def _tell_loss(self, reason: str) -> None:
        dead = self._owner.known_dead(self.incarnation)
        for session in self.sessions:
            self.drive(session, PeerLost(reason, PeerFate.DEAD if dead else PeerFate.UNKNOWN))
        if dead:
            self._posts.peer_dead()
        for session, post in self._posts.withdraw():
            self.drive(session, PostEnded(post.id, PostStatus.REVOKED))
        # From here on ends of posts are told as they come.
        self.torn_down.set()
        broken, self._broken = self._broken, []
        for session, post_id, status in broken:
            self.drive(session, PostEnded(post_id, status))

    def _carry_out(self, session: Session, event: object, commands: tuple[Command, ...]) -> None:
        if isinstance(event, PostEnded):
            self._order.ended(session.session, event.post, self._now_ms())
        for command in commands:
            match command:
                case SendControl():
                    if self._link is not None:
                        self._link.send(command.message)
                case PostSends() | PostReceives():
                    self._order.made(session.session, command.posts)
                    self._posts.add(session, command)
                case Report():
                    self._owner.reported(session, command.event, event)
                case ArmDeadline():
                    self._arm(session, command.at_ms)
                case DropPeer():
                    self.drop(command.reason)
                case _:
                    assert_never(command)
        if session.closed:
            self._forget(session)

    def _post_ended(self, session: Session, post: Post, completion: Completion) -> None:
        done = completion.status is PostStatus.DONE
        endpoint = self._endpoint
        if not done and endpoint is not None and not endpoint.alive and not self._lost():
            # The loss of the peer is the cause; its sessions hear of that first.
            self._broken.append((session, post.id, completion.status))
            self.drop(f"data endpoint: {completion.reason}")
            return
        if not done:
            logger.warning(
                "post %d of session %s: %s, %s",
                post.id,
                session.session,
                completion.status.value,
                completion.reason,
            )
        self.drive(session, PostEnded(post.id, completion.status))

    def _lost(self) -> bool:
        return self.torn_down.is_set()

    def _arm(self, session: Session, at_ms: int) -> None:
        timer = self._timers.pop(session.session, None)
        if timer is not None:
            timer.cancel()
        at_s = max(at_ms / 1000, self._loop.time())
        self._timers[session.session] = self._loop.call_at(at_s, self._expire, session, at_s)

    def _expire(self, session: Session, at_s: float) -> None:
        if self._loop.time() - at_s > LATE_S:
            # This process itself stood still: what has come meanwhile is to be read first.
            timer = self._loop.call_later(LATE_S, self._pass_deadline, session)
            self._timers[session.session] = timer
        else:
            self._pass_deadline(session)

    def _pass_deadline(self, session: Session) -> None:
        self._timers.pop(session.session, None)
        self.drive(session, DeadlinePassed(self._order.ahead_ms(session.session)))

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.session, None) is None:
            return
        self._counters.sessions_in_flight -= 1
        timer = self._timers.pop(session.session, None)
        if timer is not None:
            timer.cancel()
        self._owner.session_closed(self, session)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)
