"""Transfers between engines in virtual time: the real sessions, a network of our own making.

Control messages keep their order within a direction and take a random time; posted sends and
receives match in order, and the bytes of a message land at a random moment before both sides hear
of it, so that a page that is given back too early is overwritten under its next owner. One seed
decides everything.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from tests.support.fake_executor import FakeMemory
from transfer.agent_events import AgentEvent
from transfer.agent_figures import PairState, TransferFigures
from transfer.agent_pair import Side
from transfer.context_session import ContextSession
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits
from transfer.generation_session import GenerationSession
from transfer.identity import Incarnation, PeerAddress, RankId
from transfer.lease import GroupBlocks, LeasedBlocks, TransferLease, views_of_groups
from transfer.messages import Grant, HandoffData, Pull
from transfer.outcome import PeerFate, PostStatus
from transfer.page_table import page_table_of
from transfer.plan import GroupSide, TransferPlan
from transfer.prefix import Prefix
from transfer.pull_session import PullSession
from transfer.rank_info import EngineFacts, ParallelShape, RankInfo
from transfer.region import Region
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
    FoundRequested,
    GrantRequested,
    HandOffRequested,
    NoDecodeRequested,
    PagesReady,
    PeerDied,
    PeerLost,
    PostEnded,
    PullRequested,
    ShipRequested,
)
from transfer.source_session import SourceSession
from worker.ports import Clock, Transfers

Session = ContextSession | GenerationSession
"""Pulls have sessions of their subclasses."""


class VirtualClock(Clock):
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000

    @override
    def now_ms(self) -> int:
        return self.now


class Node(Protocol):
    """A worker as the network sees it."""

    incarnation: Incarnation
    rank: int
    memory: FakeMemory
    alive: bool

    def hear(self, event: AgentEvent) -> None:
        """An agent event for the engine."""


@dataclass(eq=False)
class _Post:
    end: _End
    post: int
    region: Region
    done: bool = False


@dataclass(eq=False)
class _End:
    """One end of one session."""

    owner: SimTransfers
    session: Session
    plan: TransferPlan
    peer: SimTransfers
    lost: bool = False
    posts: list[_Post] = field(default_factory=list)


class SimNetwork:
    """Events in virtual time and the sessions of all workers."""

    def __init__(self, plan: LayoutPlan, clock: VirtualClock, rng: random.Random) -> None:
        self.plan = plan
        self.clock = clock
        self.rng = rng
        self.limits = TransferLimits(floor_ms=20_000, drain_ms=5_000)
        self.max_delay_ms = 20
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._names = count(1)
        self.members: dict[RankId, SimTransfers] = {}
        self._last: dict[tuple[RankId, RankId], int] = {}
        self.sends: dict[int, deque[_Post]] = {}
        self.receives: dict[int, deque[_Post]] = {}
        self.moved_slots = 0

    def join(self, node: Node) -> SimTransfers:
        """Give a worker its transfers."""
        transfers = SimTransfers(self, node)
        self.members[transfers.id] = transfers
        return transfers

    def name(self) -> int:
        """A fresh number."""
        return next(self._names)

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.clock.now + delay_ms, action)

    def at(self, when_ms: int, action: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (when_ms, next(self._order), action))

    def next_ms(self) -> int | None:
        """When the next thing happens."""
        return self._events[0][0] if self._events else None

    def run_due(self) -> None:
        """Everything up to now."""
        while self._events and self._events[0][0] <= self.clock.now:
            heapq.heappop(self._events)[2]()

    def delay(self) -> int:
        """A random time."""
        return self.rng.randint(0, self.max_delay_ms)

    def send(
        self, sender: SimTransfers, receiver: SimTransfers, action: Callable[[], None]
    ) -> None:
        """Deliver in order within a direction."""
        key = (sender.id, receiver.id)
        when = max(self._last.get(key, 0), self.clock.now + self.delay())
        self._last[key] = when
        self.at(when, action)

    def post(self, end: _End, command: PostSends | PostReceives) -> None:
        """Match sends with receives in order."""
        books = self.sends if isinstance(command, PostSends) else self.receives
        for post in command.posts:
            assert isinstance(post.region, Region), "these memories cannot stage"
            entry = _Post(end, post.id, post.region)
            end.posts.append(entry)
            books.setdefault(command.tag, deque()).append(entry)
        sends = self.sends.setdefault(command.tag, deque())
        receives = self.receives.setdefault(command.tag, deque())
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            self.after(self.delay(), lambda s=send, r=receive: self._move(s, r))  # type: ignore[misc]

    def _move(self, send: _Post, receive: _Post) -> None:
        if send.done or receive.done:
            return
        assert send.region.num_slots == receive.region.num_slots
        source, target = send.end.owner.node.memory, receive.end.owner.node.memory
        for index in range(send.region.num_slots):
            data = source.read_slot(send.region.pool_group, send.region.first_slot + index)
            target.write_slot(receive.region.pool_group, receive.region.first_slot + index, data)
        self.moved_slots += send.region.num_slots
        for entry in (send, receive):
            self.after(self.delay(), lambda e=entry: self.end_post(e, PostStatus.DONE))  # type: ignore[misc]

    def end_post(self, entry: _Post, status: PostStatus) -> None:
        """One side hears of the end of its request."""
        if entry.done or not entry.end.owner.node.alive:
            return
        entry.done = True
        entry.end.owner.drive(entry.end, PostEnded(entry.post, status))

    def kill(self, node: Node) -> None:
        """SIGKILL: it does nothing more, and its peers notice."""
        node.alive = False
        for member in self.members.values():
            for end in list(member.ends.values()):
                if end.peer.node.incarnation == node.incarnation != member.node.incarnation:
                    self.after(self.delay(), lambda e=end: self.lose(e, "killed"))  # type: ignore[misc]

    def lose(self, end: _End, reason: str) -> None:
        """The endpoint is closed; a peer that is not dead may still touch what was posted."""
        if end.lost or not end.owner.node.alive:
            return
        end.lost = True
        doubt = end.peer.node.alive
        fate = PeerFate.UNKNOWN if doubt else PeerFate.DEAD
        end.owner.drive(end, PeerLost(reason, fate))
        for entry in end.posts:
            if not entry.done:
                self.end_post(entry, PostStatus.LOST if doubt else PostStatus.REVOKED)

    def cut(self, left: Node, right: Node) -> None:
        """The link between two workers breaks; both live on."""
        pair = {left.incarnation, right.incarnation}
        for member in self.members.values():
            for end in list(member.ends.values()):
                if {member.node.incarnation, end.peer.node.incarnation} == pair:
                    self.after(self.delay(), lambda e=end: self.lose(e, "cut"))  # type: ignore[misc]

    def certify(self, node: Node) -> None:
        """Somebody who knows tells the others that this worker is dead."""
        node.alive = False
        for member in self.members.values():
            for end in list(member.ends.values()):
                if end.peer.node.incarnation == node.incarnation and end.lost:
                    member.drive(end, PeerDied())


class SimTransfers(Transfers):
    """The agent of one worker."""

    def __init__(self, network: SimNetwork, node: Node) -> None:
        self.network = network
        self.node = node
        self.ends: dict[str, _End] = {}
        self._known: dict[str, _End] = {}
        self._by_request: dict[str, str] = {}
        self._views = views_of_groups(network.plan)
        self.refused: dict[str, tuple[str, ...]] = {}
        self.warm: tuple[PeerAddress, ...] = ()

    @property
    def id(self) -> RankId:
        """Whose it is."""
        return RankId(self.node.incarnation, self.node.rank)

    def hand_off_pages(self, request_id: str) -> None:
        """Every rank here leads its dp group."""
        raise AssertionError(f"{request_id}: no rank hands off pages alone")

    @property
    @override
    def refusals(self) -> dict[str, tuple[str, ...]]:
        return self.refused

    @property
    @override
    def figures(self) -> TransferFigures:
        states = (PairState(Side.GENERATION, peer.rank_id, "sim", "") for peer in self.warm)
        return TransferFigures(pairs=tuple(states))

    def rank_info(self) -> RankInfo:
        """What the peer is told."""
        return RankInfo(
            incarnation=self.node.incarnation,
            rank=0,
            shape=ParallelShape(),
            layers_per_stage=(len(self.network.plan.specs),),
            tokens_per_block=self.network.plan.tokens_per_block,
            engine=EngineFacts(
                model="fake", model_hash="0", rope=(), kv_dtype="float32", attention="grouped"
            ),
            page_table=page_table_of(self.network.plan, ParallelShape()),
            data_host="sim",
            data_port=1,
        )

    @override
    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None:
        (source,) = sources
        peer = self.network.members[source.rank_id]
        name = f"s{self.network.name()}"
        plan = TransferPlan.between(peer.rank_info(), self.rank_info())
        session = GenerationSession(
            request_id=request_id,
            session=name,
            peer=source.incarnation,
            plan=plan,
            limits=self.network.limits,
            tag=self.network.name(),
        )
        end = self._enter(session, plan, peer)
        self.drive(end, GrantRequested(prompt_tokens, deadline_ms))
        if not peer.node.alive:
            self.network.after(self.network.delay(), lambda: self.network.lose(end, "dead"))

    @override
    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        end = self._of(request_id)
        if end is None:
            self._hand_back(request_id, lease)
            return
        sides = [group.receiver for group in end.plan.groups]
        blocks = self._leased(lease, sides)
        self._locally(end, PagesReady(end_block, blocks))

    def _leased(self, lease: TransferLease, sides: list[GroupSide]) -> LeasedBlocks:
        groups = (
            GroupBlocks(lease.first_block, lease.slots(self._views[side.layer_group]))
            for side in sides
        )
        return LeasedBlocks(lease, tuple(groups))

    @override
    def announce(self, request_id: str) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, AnnounceRequested())

    @override
    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        end = self._of(request_id)
        if end is None:
            self._hand_back(request_id, lease)
            return
        sides = [group.sender for group in end.plan.groups]
        blocks = self._leased(lease, sides)
        self._locally(end, ShipRequested(first_block, end_block, blocks))

    @override
    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, HandOffRequested(handoff))

    @override
    def no_decode(self, request_id: str) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, NoDecodeRequested())

    @override
    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None:
        (source,) = sources
        peer = self.network.members[source.rank_id]
        plan = TransferPlan.between(peer.rank_info(), self.rank_info())
        session = PullSession(
            request_id=request_id,
            session=f"s{self.network.name()}",
            peer=source.incarnation,
            plan=plan,
            limits=self.network.limits,
            tag=self.network.name(),
        )
        end = self._enter(session, plan, peer)
        self.drive(end, PullRequested(prefix, least_blocks, deadline_ms))
        if not peer.node.alive:
            self.network.after(self.network.delay(), lambda: self.network.lose(end, "dead"))

    @override
    def found(self, request_id: str, end_block: int) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, FoundRequested(end_block))

    @override
    def decline(self, request_id: str, reason: str) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, DeclineRequested(reason))

    @override
    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        self.warm = tuple(peers)

    @override
    def cancel(self, request_id: str, reason: str) -> None:
        end = self._of(request_id)
        if end is not None:
            self._locally(end, CancelRequested(reason))

    def drive(self, end: _End, event: object) -> None:
        """Let a session handle an event and carry its commands out."""
        if not self.node.alive:
            return
        for command in end.session.handle(event, self.network.clock.now):
            self._carry_out(end, command)
        if end.session.closed:
            self.ends.pop(end.session.session, None)

    def opened(self, opening: Grant | Pull, peer: SimTransfers) -> None:
        """Another worker's first word of a session."""
        plan = TransferPlan.between(self.rank_info(), peer.rank_info())
        kind = ContextSession if isinstance(opening, Grant) else SourceSession
        session = kind(
            request_id=opening.request_id,
            session=opening.session,
            peer=peer.node.incarnation,
            plan=plan,
            limits=self.network.limits,
            costs=TransferCosts(),
        )
        end = self._enter(session, plan, peer)
        self.drive(end, opening)

    def _locally(self, end: _End, event: object) -> None:
        """As the engine's calls are: carried out a little later, in order, in the IO thread."""
        self.network.send(self, self, lambda: self.drive(end, event))

    def _hand_back(self, request_id: str, lease: TransferLease) -> None:
        raise AssertionError(f"{request_id}: pages were given to a session that never was")

    def _enter(self, session: Session, plan: TransferPlan, peer: SimTransfers) -> _End:
        end = _End(self, session, plan, peer)
        self.ends[session.session] = end
        self._known[session.session] = end
        self._by_request[session.request_id] = session.session
        return end

    def _of(self, request_id: str) -> _End | None:
        name = self._by_request.get(request_id)
        return None if name is None else self._known[name]

    def _carry_out(self, end: _End, command: Command) -> None:
        network = self.network
        match command:
            case SendControl():
                message = command.message
                network.send(
                    self,
                    end.peer,
                    lambda: end.peer.hear_control(end.session.session, message, self),
                )
            case PostSends() | PostReceives():
                network.post(end, command)
            case Report():
                self.node.hear(command.event)
            case ArmDeadline():
                network.at(command.at_ms, lambda: self._deadline(end))
            case DropPeer():
                network.after(0, lambda: network.lose(end, command.reason))

    def _deadline(self, end: _End) -> None:
        if not end.session.closed:
            self.drive(end, DeadlinePassed())

    def hear_control(self, session: str, message: object, sender: SimTransfers) -> None:
        """A control message arrives."""
        if not self.node.alive or not sender.node.alive:
            return
        if isinstance(message, Grant | Pull):
            self.opened(message, sender)
            return
        end = self._known.get(session)
        if end is not None and not end.session.closed:
            self.drive(end, message)
