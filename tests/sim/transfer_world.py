"""Context and generation processes, the links between them, what may befall them, and what must
hold when everything has come to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tests.sim.transfer_agent import LIMITS, Handled, SimAgent, SimPair, Watch
from tests.sim.transfer_engine import SCOPE, Script, SimEngine
from tests.sim.transfer_memory import SimStaging, StampedMemory
from tests.sim.transfer_network import Clock, Link, Weather
from tests.sim.transfer_process import CONTEXT, GENERATION, Process
from tests.sim.transfer_terrain import Site, Terrain
from transfer.agent_events import SessionEnded
from transfer.grants_out import GrantOrder, Order
from transfer.identity import Incarnation, PeerAddress
from transfer.messages import SessionMessage
from transfer.outcome import Outcome
from transfer.prefix import Prefix
from transfer.pull_order import PullOrder
from transfer.rank_info import RankInfo
from transfer.session import SessionState
from transfer.session_events import PeerLost

DIAL_MS = (20, 50)
SILENCE_MS = 500
"""A peer without a heartbeat for as long is given up."""
FELLOWS_MS = (0, 200)
"""From the death of a rank to that of its instance."""
STRIKES = ("kill", "cut", "hold", "pause")


@dataclass(frozen=True, eq=False)
class Rank:
    """One process and what runs in it."""

    site: Site
    process: Process
    memory: StampedMemory
    agent: SimAgent
    engine: SimEngine


@dataclass(frozen=True, eq=False)
class Instance:
    """Processes that live and die together."""

    side: int
    incarnation: Incarnation
    ranks: tuple[Rank, ...]

    @property
    def alive(self) -> bool:
        """Whether all of it is."""
        return all(rank.process.alive for rank in self.ranks)

    @property
    def gone(self) -> bool:
        """Whether nothing of it lives."""
        return not any(rank.process.alive for rank in self.ranks)


@dataclass(frozen=True, eq=False)
class Request:
    """One request between two instances."""

    request_id: str
    script: Script
    context: Instance
    generation: Instance
    started_ms: int

    @property
    def end_ms(self) -> int:
        """When all must be over."""
        return self.started_ms + self.script.deadline_ms


class World:
    """``instances`` of either role. ``watches`` see every handled event."""

    def __init__(
        self,
        seed: int,
        terrain: Terrain,
        weather: Weather,
        *,
        instances: int = 1,
        slots: int = 24,
        deaths_are_known: bool = True,
        hears_ms: tuple[int, int] = (0, 0),
    ) -> None:
        """``hears_ms`` is how long an event takes from the transfer to the engine."""
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.terrain = terrain
        self.weather = weather
        self.deaths_are_known = deaths_are_known
        self.watches: list[Watch] = []
        self.requests: list[Request] = []
        self.links: list[Link] = []
        self.faults: Counter[str] = Counter()
        """What was done to it, and what a watch counts."""
        self._slots = slots
        self._hears_ms = hears_ms
        self._scripts: dict[str, Script] = {}
        self._story: list[tuple[int, str, Handled | None, str]] = []
        self._nonces = 0
        self.buried: list[Instance] = []
        """Dead instances that others have taken the place of."""
        self.contexts = [self._instance(CONTEXT, f"c{n}") for n in range(instances)]
        self.generations = [self._instance(GENERATION, f"g{n}") for n in range(instances)]

    @property
    def instances(self) -> list[Instance]:
        """Those that may be alive."""
        return [*self.contexts, *self.generations]

    @property
    def ranks(self) -> list[Rank]:
        """Processes that may be alive."""
        return [rank for instance in self.instances for rank in instance.ranks]

    def tell(self, text: str) -> None:
        """A line of the story."""
        self._story.append((self.clock.now_ms, text, None, ""))

    def story(self, last: int = 400) -> str:
        """What has happened, oldest first."""
        lines = []
        for now_ms, text, handled, after in self._story[-last:]:
            if handled is not None:
                session, event = handled.session, handled.event
                text = (
                    f"{handled.process.name} {session.request_id} {session.session}: "
                    f"{handled.before.name} "
                    f"{type(event).__name__} -> {after}"
                )
            lines.append(f"{now_ms:6} ms  {text}")
        return "\n".join(lines)

    # What goes wrong.

    def kill(self, rank: Rank) -> None:
        """The process is gone, and soon its instance is. Peers notice, and sooner or later they are
        told, or are not.
        """
        if not rank.process.alive:
            return
        self.faults["kill"] += 1
        self._die(rank)
        instance = self.instance_of(rank)
        for fellow in instance.ranks:
            if fellow.process.alive:
                self.clock.after(self.rng.randint(*FELLOWS_MS), partial(self._die_with, fellow))
        if instance.gone and self.deaths_are_known:
            self.tell_death(instance)

    def instance_of(self, rank: Rank) -> Instance:
        """What a rank belongs to."""
        everything = [*self.instances, *self.buried]
        return next(instance for instance in everything if rank in instance.ranks)

    def _die_with(self, fellow: Rank) -> None:
        """Whoever started the processes ends what is left of an instance."""
        instance = self.instance_of(fellow)
        if fellow.process.alive:
            self._die(fellow)
            if instance.gone and self.deaths_are_known:
                self.tell_death(instance)

    def _die(self, rank: Rank) -> None:
        process = rank.process
        self.tell(f"{process.name} dies")
        process.alive = False
        for pair in rank.agent.pairs:
            wait_ms = self.rng.randint(*self.weather.notice_ms)
            self.clock.after(
                wait_ms, partial(pair.link.close, 1 - process.side, "connection reset")
            )

    def tell_death(self, dead: Instance) -> None:
        """Whoever started the process tells the others of its death."""
        for peer in self.ranks:
            wait_ms = self.rng.randint(*self.weather.death_told_ms)
            told = partial(peer.agent.peer_known_dead, dead.incarnation)
            self.clock.after(wait_ms, partial(peer.process.run, told))

    def restart(self, dead: Instance) -> None:
        """A new instance takes the place of a dead one."""
        if not dead.gone or dead in self.buried:
            return
        place = self.contexts if dead.side == CONTEXT else self.generations
        fresh = self._instance(dead.side, dead.incarnation.instance)
        self.tell(f"{fresh.incarnation} starts")
        self.faults["restart"] += 1
        self.buried.append(dead)
        place[place.index(dead)] = fresh

    def cut(self, rank: Rank) -> None:
        """Every open connection of the rank breaks."""
        self.tell(f"connections of {rank.process.name} break")
        for pair in rank.agent.pairs:
            if pair.open and not pair.link.is_cut:
                self.faults["cut"] += 1
                pair.link.cut()

    def hold(self, rank: Rank, hold_ms: int) -> None:
        """Whatever is under way from or to the rank is late."""
        self.tell(f"connections of {rank.process.name} are held up for {hold_ms} ms")
        for pair in rank.agent.pairs:
            if pair.open:
                self.faults["hold"] += 1
                pair.link.hold(hold_ms)

    def pause(self, rank: Rank, pause_ms: int) -> None:
        """The process stands still; peers give up without a heartbeat."""
        self.silence(rank, pause_ms)
        if pause_ms > SILENCE_MS:
            for pair in rank.agent.pairs:
                self.clock.after(
                    SILENCE_MS, partial(pair.link.close, 1 - rank.process.side, "silent")
                )

    def silence(self, rank: Rank, pause_ms: int) -> None:
        """The process stands still, and no heartbeat tells."""
        self.tell(f"{rank.process.name} stands still for {pause_ms} ms")
        self.faults["pause"] += 1
        rank.process.pause(pause_ms)

    # Requests.

    def start(
        self, request_id: str, script: Script, context: Instance, generation: Instance
    ) -> None:
        """The generation engines grant, or pull."""
        if not generation.alive:
            return
        self.tell(f"{request_id}: {context.incarnation} to {generation.incarnation}")
        self._scripts[request_id] = script
        request = Request(request_id, script, context, generation, self.clock.now_ms)
        self.requests.append(request)
        for side, at_ms, deed in script.deeds:
            first, *others = (context, generation)[side].ranks
            self.clock.after(at_ms, partial(self.act, first, request_id, deed))
            for rank in others:
                # A deed of one rank is one of all of them, sometime, unless the peer is faster.
                late_ms = at_ms + self.rng.choice((0, 20, 2_000))
                self.clock.after(late_ms, partial(self.act, rank, request_id, deed))
        for rank in generation.ranks:
            rank.process.run(partial(self._dial, request, rank))

    def act(self, rank: Rank, request_id: str, deed: str) -> None:
        """Cancel or fail a request at one rank, whether it is known there or not."""
        verb = rank.agent.cancel if deed == "cancel" else rank.agent.fail
        if rank.process.alive:
            self.tell(f"{rank.process.name}: {deed} {request_id}")
            rank.process.run(partial(verb, request_id, deed))

    def _dial(self, request: Request, rank: Rank) -> None:
        rank.engine.expect(request.request_id)
        if rank.agent.dial(request.request_id):
            self._open(request, rank)

    def _open(self, request: Request, rank: Rank) -> None:
        """Over the connections there are, or new ones, as soon as the last ones are through."""
        agent, request_id = rank.agent, request.request_id
        if request_id not in agent.dialling:
            return
        left_ms = request.end_ms - self.clock.now_ms
        if left_ms <= 0:
            agent.no_connection(request_id)
            return
        pairs = [self._pair(context, rank) for context in request.context.ranks]
        if all(pair is not None for pair in pairs):
            agent.open(_order(request))
        else:
            wait_ms = min(left_ms, self.rng.randint(*DIAL_MS))
            again = partial(rank.process.run, partial(self._open, request, rank))
            self.clock.after(wait_ms, again)

    def _pair(self, context: Rank, generation: Rank) -> SimPair | None:
        """The generation's end of an open link to the context, if one can be had."""
        peer = context.agent.info.rank_id
        mine = [pair for pair in generation.agent.pairs if pair.peer.rank_id == peer]
        if mine and mine[-1].open:
            return mine[-1]
        if not context.process.alive or context.process.paused:
            return None
        own = generation.agent.info.rank_id
        theirs = [pair for pair in context.agent.pairs if pair.peer.rank_id == own]
        if not all(pair.quiet for pair in (*mine, *theirs)):
            return None
        # Each end has shown itself anew: it is through with the earlier link.
        for pair in (*mine, *theirs):
            pair.peer_dead()
        return self._connect(context, generation)

    def _connect(self, context: Rank, generation: Rank) -> SimPair:
        ends = (context, generation)
        link = Link(
            clock=self.clock,
            rng=self.rng,
            weather=self.weather,
            alive=(lambda: context.process.alive, lambda: generation.process.alive),
        )
        self.links.append(link)
        plan = self.terrain.plans[context.site.info.rank, generation.site.info.rank]
        for rank, other in (ends, ends[::-1]):
            pair = SimPair(rank.agent, link, other.agent.info, plan)
            rank.agent.pairs.append(pair)
            link.deliver.append(partial(self._deliver, pair))
            link.closed.append(partial(self._link_closed, pair))
        return generation.agent.pairs[-1]

    def _deliver(self, pair: SimPair, message: SessionMessage) -> None:
        pair.process.run(partial(pair.received, message))

    def _link_closed(self, pair: SimPair, reason: str) -> None:
        pair.process.run(partial(pair.link_closed, reason))

    def _instance(self, side: int, name: str) -> Instance:
        self._nonces += 1
        incarnation = Incarnation(instance=name, nonce=str(self._nonces))
        told = {"incarnation": incarnation}
        sites = [
            replace(site, info=site.info.model_copy(update=told))
            for site in self.terrain.sides[side]
        ]
        infos = [site.info for site in sites]
        return Instance(side, incarnation, tuple(self._rank(side, one, infos) for one in sites))

    def _rank(self, side: int, site: Site, instance: list[RankInfo]) -> Rank:
        process = Process(side, site.info.rank_id, self.clock, self.rng)
        layout = site.layout
        in_turn = partial(process.in_turn, (0, self.terrain.pass_ms))
        message_bytes = site.info.staging_message_bytes
        staging = SimStaging(message_bytes, in_turn) if site.info.can_stage else None
        memory = StampedMemory(layout, site.parts, staging)
        agent = SimAgent(
            process, memory, site, instance, self.terrain.costs, self.watches, self._handled
        )
        slots = (self._slots,) * len(layout.pool_groups)
        engine = SimEngine(
            process, layout, slots, memory, agent, self._scripts.__getitem__, self._hears_ms
        )
        return Rank(site, process, memory, agent, engine)

    def _handled(self, handled: Handled) -> None:
        after = f"{handled.session.state.name}, {handled.session.outcome.name}"
        self._story.append((self.clock.now_ms, "", handled, after))
        if isinstance(handled.event, PeerLost):
            self.faults["lost"] += 1

    # What must hold at rest.

    def finish(self) -> None:
        """Come to rest and check; then end what is in doubt by proof, and check again."""
        self.clock.run()
        self._check_rest()
        for dead in [*self.buried, *(one for one in self.instances if one.gone)]:
            self.tell_death(dead)
        self.clock.run()
        while doubted := self._doubted():
            # Somebody has to prove it: one of two instances that doubt each other is ended.
            self.tell(f"{doubted.incarnation} is ended")
            for rank in doubted.ranks:
                rank.process.alive = False
            self.tell_death(doubted)
            self.clock.run()
        self._check_rest()
        for rank in self.ranks:
            if rank.process.alive:
                rank.engine.check_home()
                for pair in rank.agent.pairs:
                    assert not pair.sessions, f"{rank.process.name} keeps a session"
                    assert pair.posts.settled or pair.open, "a staging buffer was never let go"

    @property
    def _is_calm(self) -> bool:
        """Whether nothing happens that takes as long as sessions wait."""
        move_ms = self.weather.move_ms[1] + self.weather.finish_ms[1]
        return self.faults.keys().isdisjoint(STRIKES) and move_ms < LIMITS.drain_ms

    def _doubted(self) -> Instance | None:
        """An instance that another is in doubt of."""
        for rank in self.ranks:
            for pair in rank.agent.pairs if rank.process.alive else ():
                if pair.sessions or not (pair.posts.settled or pair.open):
                    return next(
                        one
                        for one in self.instances
                        if one.incarnation == pair.incarnation and not one.gone
                    )
        return None

    def _check_rest(self) -> None:
        for rank in self.ranks:
            if not rank.process.alive:
                continue
            agent = rank.agent
            for request_id, started in agent.started.items():
                ends = self.ends(rank, request_id)
                assert len(ends) == started, f"{rank.process.name} {request_id} never ended"
            assert not agent.dialling
            for pair in agent.pairs:
                assert not pair.armed, f"{rank.process.name} has something armed"
                assert pair.posts.quiet.is_set(), f"{rank.process.name} waits for a request"
                for session in pair.sessions.values():
                    assert session.state is SessionState.DOUBT, session.story
                    assert pair.incarnation not in agent.dead, "doubt of a process known dead"
            rank.engine.check_doubt()
            assert not (self._is_calm and agent.drops), f"dropped for nothing: {agent.drops}"
        for request in self.requests:
            self._check_agreement(request)
            self._check_deadline(request)

    def _check_agreement(self, request: Request) -> None:
        """What all senders believe received was received; it is decoded once at most."""
        request_id = request.request_id
        others = [
            other for other in self.requests if other.request_id == request_id and other != request
        ]
        believed = min(self._received(rank, request_id) for rank in request.context.ranks)
        for rank in request.generation.ranks:
            if not rank.process.alive:
                continue
            received = self._received(rank, request_id)
            heard = rank.engine.heard.get(request_id)
            if heard is not None:
                assert heard.handoffs == received, "handed off and ended differ"
            if not others:
                assert believed <= received, "the senders think it was received, it was not"

    def _received(self, rank: Rank, request_id: str) -> int:
        """How often a request was received, as this rank was told."""
        return sum(
            end.outcome is Outcome.SUCCEEDED and end.reason == "received"
            for end in self.ends(rank, request_id)
        )

    def _check_deadline(self, request: Request) -> None:
        for rank in request.generation.ranks:
            heard = rank.engine.heard.get(request.request_id)
            if heard is None or rank.process.was_paused or len(heard.ended_ms) != 1:
                continue
            assert heard.ended_ms[0] <= request.end_ms, f"{request.request_id} ended late"

    def ends(self, rank: Rank, request_id: str) -> list[SessionEnded]:
        """How the sessions of a request ended at a rank."""
        heard = rank.engine.heard.get(request_id)
        return heard.ends if heard is not None else []


def _order(request: Request) -> Order:
    request_id, script = request.request_id, request.script
    sources = tuple(
        PeerAddress(
            incarnation=request.context.incarnation,
            rank=rank.site.info.rank,
            host="",
            control_port=1,
        )
        for rank in request.context.ranks
    )
    end_s = request.end_ms / 1000
    if script.least_blocks is None:
        return GrantOrder(request_id, sources, len(script.prompt), end_s)
    prefix = Prefix(SCOPE, np.asarray(script.whole_blocks, dtype=np.int32))
    return PullOrder(request_id, sources, prefix, script.least_blocks, end_s)
