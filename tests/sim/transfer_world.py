"""Ranks with real sessions, fake pages with owners, and engines that do as a script says.

The shell here is what an agent is: it routes messages by session id, carries out commands in order
and knows nothing of the protocol.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.sim.transfer_memory import SimEndpoint, SimMemory
from tests.sim.transfer_network import Clock, Link, Weather
from tests.sim.transfer_pages import (
    PLAN,
    WHOLE,
    WINDOW_BLOCKS,
    FakeLease,
    Pages,
    Sequence,
    Terrain,
)
from tests.sim.transfer_ranks import Rank, Script
from transfer.agent_counters import TransferCounters
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.context_session import ContextSession
from transfer.deadlines import TransferLimits
from transfer.generation_session import GenerationSession
from transfer.identity import Incarnation
from transfer.messages import ChoiceHandoff, Grant, HandoffData, SessionMessage
from transfer.outcome import Outcome, PeerFate, PostStatus
from transfer.pair_posts import PairPosts, Schedule
from transfer.region import Post
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
    FailureReported,
    GrantRequested,
    HandOffRequested,
    NoDecodeRequested,
    PagesReady,
    PeerDied,
    PeerLost,
    PostEnded,
    ShipRequested,
)
from transfer.transport import Completion

CONTEXT, GENERATION = 0, 1
LIMITS = TransferLimits(floor_ms=600, least_bytes_per_ms=10, drain_ms=400)


class World:
    """Runs requests between context and generation ranks. ``watch`` sees every handled event."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        ranks: int = 2,
        slots: int = 24,
        terrain: Terrain = WHOLE,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.weather = weather
        self.terrain = terrain
        self.deaths_are_known = True
        self.watch: list[Callable[[Rank, Session], None]] = []
        self.scripts: dict[str, Script] = {}
        self.started_ms: dict[str, int] = {}
        self.handoffs: Counter[str] = Counter()
        self.drops: list[str] = []
        self.contexts, self.generations = (
            tuple(
                Rank(
                    side,
                    Incarnation(instance=f"{letter}{number}", nonce="0"),
                    Pages(slots, terrain.stride),
                )
                for number in range(ranks)
            )
            for side, letter in ((CONTEXT, "c"), (GENERATION, "g"))
        )
        self._current: dict[tuple[str, str], Link] = {}

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return (*self.contexts, *self.generations)

    # What goes wrong.

    def kill(self, rank: Rank) -> None:
        """The process is gone; its peers notice, and sooner or later are told, or are not."""
        if not rank.alive:
            return
        rank.alive = False
        for link in self._links_of(rank):
            self._after(60, partial(link.close, 1 - rank.side, "connection reset"))
        if self.deaths_are_known:
            for peer in self.ranks:
                if peer.side != rank.side:
                    self._after(800, partial(self._tell_death, peer, rank))

    def _tell_death(self, peer: Rank, dead: Rank) -> None:
        if not peer.alive:
            return
        for session in tuple(peer.sessions.values()):
            if session.peer == dead.incarnation:
                peer.links[session.session].close(peer.side, "peer died")
        for link, posts in tuple(peer.posts.items()):
            if dead in link.ranks:
                posts.when_still(partial(self._end_doubts, peer, link))

    def _end_doubts(self, rank: Rank, link: Link) -> None:
        rank.posts[link].peer_dead()
        for session in tuple(rank.sessions.values()):
            if rank.links[session.session] is link:
                self._handle(rank, session, PeerDied())

    def drop_links(self, rank: Rank) -> None:
        """Every connection of the rank breaks; each end notices on its own."""
        for link in self._links_of(rank):
            for side in (CONTEXT, GENERATION):
                self._after(60, partial(link.close, side, "network"))

    def pause(self, rank: Rank, pause_ms: int) -> None:
        """The process stands still; peers give up after 500 ms without a heartbeat."""
        rank.paused_until_ms = self.clock.now_ms + pause_ms
        if pause_ms > 500:
            for link in self._links_of(rank):
                self.clock.after(500, partial(link.close, 1 - rank.side, "silent"))

    def _links_of(self, rank: Rank) -> list[Link]:
        return [link for pair, link in self._current.items() if rank.name in pair]

    # Requests and engines.

    def start(self, request_id: str, script: Script, context: Rank, generation: Rank) -> None:
        """The generation engine grants."""
        self.scripts[request_id] = script
        self.started_ms[request_id] = self.clock.now_ms
        for side, at_ms, deed in script.deeds:
            rank = (context, generation)[side]
            self.clock.after(at_ms, partial(self.act, rank, request_id, deed))
        if not (context.alive and generation.alive):
            return
        session = GenerationSession(
            request_id=request_id,
            session=f"s-{request_id}",
            peer=context.incarnation,
            plan=self.terrain.plan,
            limits=LIMITS,
            tag=self.rng.getrandbits(64),
        )
        self._add(generation, session, self._link(context, generation))
        self._handle(generation, session, GrantRequested(100, script.deadline_ms))

    def act(self, rank: Rank, request_id: str, deed: str) -> None:
        """Cancel or fail a request at one rank, whether it is known there or not."""
        if not rank.alive:
            return
        session = rank.session(request_id)
        if session is not None:
            event = CancelRequested(deed) if deed == "cancel" else FailureReported(deed)
            self._handle(rank, session, event)
        elif deed == "cancel" and request_id not in rank.session_of:
            rank.cancels.remember(request_id, deed)

    def _engine(self, rank: Rank, event: AgentEvent) -> None:
        match event:
            case GrantReceived(request_id=request_id):
                self._later(rank, 10, lambda: self._prefill(rank, request_id))
            case AnnounceReceived(request_id=request_id):
                self._later(rank, 5, lambda: self._allocate(rank, request_id))
            case HandoffReceived(request_id=request_id):
                self.handoffs[request_id] += 1
                self._check_content(rank, request_id)
            case LeaseEnded(lease=lease):
                lease.release()
            case LeaseInDoubt(lease=lease):
                lease.quarantine()
            case SessionEnded(request_id=request_id):
                assert request_id not in rank.outcomes, "a session ended twice"
                rank.outcomes[request_id] = event
                rank.ended_ms[request_id] = self.clock.now_ms
                self._later(rank, 60, lambda: self._close(rank, request_id))
            case _:
                pass

    def _close(self, rank: Rank, request_id: str) -> None:
        sequence = rank.sequences.get(request_id)
        if sequence is not None:
            sequence.close()

    def _prefill(self, rank: Rank, request_id: str) -> None:
        script = self.scripts[request_id]
        if request_id in rank.outcomes:
            return
        sequence = Sequence.allocate(rank.pages, request_id, script.prompt_blocks, (0, 0))
        if sequence is None:
            self._later(rank, 40, lambda: self._prefill(rank, request_id))
            return
        rank.sequences[request_id] = sequence
        self._tell(rank, request_id, AnnounceRequested())
        self._later(rank, script.chunk_ms, lambda: self._chunk(rank, request_id, 0))

    def _chunk(self, rank: Rank, request_id: str, start: int) -> None:
        script, sequence = self.scripts[request_id], rank.sequences[request_id]
        if request_id in rank.outcomes:
            return
        end = min(start + script.chunk_blocks, script.prompt_blocks)
        for group, table in enumerate(sequence.tables):
            for pool in range(len(PLAN.groups[group].sender.slot_bytes)):
                for block in range(start, end):
                    place = (group, pool, int(table[block]))
                    rank.pages.content[place] = (request_id, block, group, pool)
        lease = sequence.lease(start, end)
        if not self._tell(rank, request_id, ShipRequested(start, end, lease.blocks())):
            lease.release()
            return
        if end < script.prompt_blocks:
            self._later(rank, script.chunk_ms, lambda: self._chunk(rank, request_id, end))
        elif script.no_decode:
            self._tell(rank, request_id, NoDecodeRequested())
        else:
            data = HandoffData(choices=(ChoiceHandoff(token=7),), cached_tokens=0)
            self._tell(rank, request_id, HandOffRequested(data))

    def _first_blocks(self, request_id: str) -> tuple[int, int]:
        script = self.scripts[request_id]
        return script.cached_blocks, max(script.cached_blocks, script.prompt_blocks - WINDOW_BLOCKS)

    def _allocate(self, rank: Rank, request_id: str) -> None:
        if request_id in rank.outcomes:
            return
        script, firsts = self.scripts[request_id], self._first_blocks(request_id)
        sequence = Sequence.allocate(rank.pages, request_id, script.prompt_blocks, firsts)
        if sequence is None:
            self._later(rank, 40, lambda: self._allocate(rank, request_id))
            return
        rank.sequences[request_id] = sequence
        lease = sequence.lease(script.cached_blocks, script.prompt_blocks)
        event = PagesReady(script.prompt_blocks, lease.blocks(firsts))
        if not self._tell(rank, request_id, event):
            lease.release()

    def _check_content(self, rank: Rank, request_id: str) -> None:
        sequence = rank.sequences[request_id]
        for group, first in enumerate(self._first_blocks(request_id)):
            for pool in range(len(PLAN.groups[group].receiver.slot_bytes)):
                for block in range(first, self.scripts[request_id].prompt_blocks):
                    slot = int(sequence.tables[group][block])
                    found = rank.pages.content.get((group, pool, slot))
                    assert found == (request_id, block, group, pool), f"wrong page: {found}"

    # The shell.

    def _tell(self, rank: Rank, request_id: str, event: object) -> bool:
        session = rank.session(request_id)
        if session is None:
            return False
        self._handle(rank, session, event)
        return True

    def _add(self, rank: Rank, session: Session, link: Link) -> None:
        rank.sessions[session.session] = session
        rank.session_of[session.request_id] = session.session
        rank.links[session.session] = link

    def _receive(self, rank: Rank, peer: Rank, link: Link, message: SessionMessage) -> None:
        session = rank.sessions.get(message.session)
        if session is None:
            if not isinstance(message, Grant) or message.session in rank.ended:
                return
            session = ContextSession(
                request_id=message.request_id,
                session=message.session,
                peer=peer.incarnation,
                plan=self.terrain.plan,
                limits=LIMITS,
                costs=self.terrain.costs,
            )
            self._add(rank, session, link)
        self._handle(rank, session, message)
        if isinstance(message, Grant):
            reason = rank.cancels.take(message.request_id)
            if reason is not None:
                self._tell(rank, message.request_id, CancelRequested(reason))

    def _handle(self, rank: Rank, session: Session, event: object) -> None:
        commands = session.handle(event, self.clock.now_ms)
        for command in commands:
            self._perform(rank, session, command)
        if session.closed and rank.sessions.pop(session.session, None) is not None:
            rank.ended.add(session.session)
        for look in self.watch:
            look(rank, session)

    def _perform(self, rank: Rank, session: Session, command: Command) -> None:
        link = rank.links[session.session]
        match command:
            case SendControl(message=message):
                link.send(rank.side, message)
            case PostSends() | PostReceives():
                rank.posts[link].add(session, command)
            case Report(event=event):
                self._engine(rank, event)
            case ArmDeadline(at_ms=at_ms):
                rank.armed[session.session] = at_ms
                self.clock.after(
                    at_ms - self.clock.now_ms, lambda: self._ring(rank, session, at_ms)
                )
            case DropPeer(reason=reason):
                self.drops.append(reason)
                self.clock.after(0, lambda: link.close(rank.side, reason))

    def _ring(self, rank: Rank, session: Session, at_ms: int) -> None:
        if not rank.alive or rank.armed[session.session] != at_ms:
            return
        if rank.paused_until_ms > self.clock.now_ms:
            wait_ms = rank.paused_until_ms - self.clock.now_ms
            self.clock.after(wait_ms, lambda: self._ring(rank, session, at_ms))
        elif session.session in rank.sessions:
            self._handle(rank, session, DeadlinePassed())

    def _post_over(self, rank: Rank, session: Session, post: Post, end: Completion) -> None:
        if session.session in rank.sessions:
            self._handle(rank, session, PostEnded(post.id, end.status))

    def _lost(self, rank: Rank, peer: Rank, link: Link, reason: str) -> None:
        rank.posts[link].when_still(partial(self._tell_loss, rank, peer, link, reason))

    def _tell_loss(self, rank: Rank, peer: Rank, link: Link, reason: str) -> None:
        known = not peer.alive and self.deaths_are_known and self.rng.random() < 0.5
        for session in tuple(rank.sessions.values()):
            if rank.links[session.session] is link:
                fate = PeerFate.DEAD if known else PeerFate.UNKNOWN
                self._handle(rank, session, PeerLost(reason, fate))
        if known:
            rank.posts[link].peer_dead()
        for session, post in rank.posts[link].withdraw():
            self._post_over(rank, session, post, Completion(PostStatus.REVOKED, reason))

    def _link(self, context: Rank, generation: Rank) -> Link:
        pair = (context.name, generation.name)
        link = self._current.get(pair)
        if link is not None and all(link.open):
            return link
        link = Link(
            clock=self.clock,
            rng=self.rng,
            weather=self.weather,
            alive=(lambda: context.alive, lambda: generation.alive),
            ranks=(context, generation),
            deliver=[],
            closed=[],
        )
        for rank, peer in ((context, generation), (generation, context)):
            link.deliver.append(self._deliverer(rank, peer, link))
            link.closed.append(self._closer(rank, peer, link))
            rank.posts[link] = self._posts(rank, link)
        self._current[pair] = link
        return link

    def _posts(self, rank: Rank, link: Link) -> PairPosts:
        def soon(action: Callable[[], None]) -> None:
            self.clock.after(0, partial(self._run, rank, action))

        posts = PairPosts(
            plan=self.terrain.plan,
            memory=SimMemory(rank.pages, partial(self._pass, rank)),
            counters=TransferCounters(),
            schedule=Schedule(lambda: self.clock.now_ms / 1000, soon),
            over=partial(self._post_over, rank),
        )
        posts.bind(SimEndpoint(link, rank.side, partial(self._run, rank)))
        return posts

    def _pass(self, rank: Rank, touch: Callable[[], None]) -> None:
        if self.terrain.pass_ms:
            self._later(rank, self.terrain.pass_ms, touch)
        else:
            touch()

    def _deliverer(self, rank: Rank, peer: Rank, link: Link) -> Callable[[SessionMessage], None]:
        def deliver(message: SessionMessage) -> None:
            self._run(
                rank,
                lambda: self._receive(rank, peer, link, message) if link.open[rank.side] else None,
            )

        return deliver

    def _closer(self, rank: Rank, peer: Rank, link: Link) -> Callable[[str], None]:
        return lambda reason: self._run(rank, lambda: self._lost(rank, peer, link, reason))

    def _run(self, rank: Rank, action: Callable[[], object]) -> None:
        """Run in the process of ``rank``: now, when it goes on, or never."""
        if not rank.alive:
            return
        if rank.paused_until_ms > self.clock.now_ms:
            wait_ms = rank.paused_until_ms - self.clock.now_ms
            self.clock.after(wait_ms, lambda: self._run(rank, action))
        else:
            action()

    def _after(self, most_ms: int, action: Callable[[], None]) -> None:
        self.clock.after(self.rng.randint(0, most_ms), action)

    def _later(self, rank: Rank, most_ms: int, action: Callable[[], None]) -> None:
        self._after(most_ms, lambda: self._run(rank, action))

    # What must hold when everything has come to rest.

    def check(self) -> None:
        """Every session ended once, every page is free or in justified doubt."""
        for rank in self.ranks:
            if not rank.alive:
                continue
            for request_id, session_id in rank.session_of.items():
                assert request_id in rank.outcomes, f"{rank.name} {request_id} never ended"
                deadline_ms = self.started_ms[request_id] + self.scripts[request_id].deadline_ms
                assert rank.paused_until_ms or (
                    rank.ended_ms[request_id] <= deadline_ms + max(self.weather.delay_ms)
                ), f"{rank.name} {request_id} ended after its deadline"
                session = rank.sessions.get(session_id)
                if session is not None:
                    self._check_doubt(session)
            for posts in rank.posts.values():
                assert posts.quiet.is_set(), f"{rank.name} waits for a request"
            for sequence in rank.pages.owners():
                doubted = [lease for lease in sequence.leases if not lease.over]
                assert doubted, f"{rank.name} keeps pages that nobody needs"
                assert all(lease.doubted for lease in doubted), f"{rank.name} leaks a lease"
        for request_id in self.scripts:
            self._check_agreement(request_id)

    def _check_doubt(self, session: Session) -> None:
        assert session.state is SessionState.DOUBT, session.story
        peer = next(rank for rank in self.ranks if rank.incarnation == session.peer)
        assert peer.alive or not self.deaths_are_known, "doubt although the peer is known dead"

    def _check_agreement(self, request_id: str) -> None:
        received = {
            rank.side
            for rank in self.ranks
            if (end := rank.outcomes.get(request_id))
            and end.outcome is Outcome.SUCCEEDED
            and end.reason == "received"
        }
        assert self.handoffs[request_id] == (1 if GENERATION in received else 0) or any(
            not rank.alive for rank in self.generations
        )
        if CONTEXT in received and all(rank.alive for rank in self.generations):
            assert GENERATION in received, "the sender thinks it was received, it was not"


__all__ = ["FakeLease", "Rank", "Script", "World"]
