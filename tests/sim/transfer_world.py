"""Context and generation processes, the links between them, what may befall them, and what must
hold when everything has come to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from tests.sim.transfer_agent import LIMITS, Handled, SimAgent, SimPair, Watch
from tests.sim.transfer_engine import Script, SimEngine
from tests.sim.transfer_memory import SimStaging, StampedMemory
from tests.sim.transfer_network import Clock, Link, Weather
from tests.sim.transfer_process import CONTEXT, GENERATION, Process
from tests.sim.transfer_terrain import Terrain
from transfer.agent_events import SessionEnded
from transfer.identity import Incarnation
from transfer.messages import SessionMessage
from transfer.outcome import Outcome
from transfer.session import SessionState
from transfer.session_events import PeerLost

DIAL_MS = (20, 50)
SILENCE_MS = 500
"""A peer without a heartbeat for as long is given up."""
STRIKES = ("kill", "cut", "hold", "pause")


@dataclass(frozen=True, eq=False)
class Rank:
    """One process and what runs in it."""

    process: Process
    memory: StampedMemory
    agent: SimAgent
    engine: SimEngine


@dataclass(frozen=True, eq=False)
class Request:
    """One request between two ranks."""

    request_id: str
    script: Script
    context: Rank
    generation: Rank
    started_ms: int


class World:
    """``ranks`` instances of either role. ``watches`` see every handled event."""

    def __init__(
        self,
        seed: int,
        terrain: Terrain,
        weather: Weather,
        *,
        ranks: int = 1,
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
        self.buried: list[Rank] = []
        """Dead processes that others have taken the place of."""
        self.contexts = [self._rank(CONTEXT, f"c{n}") for n in range(ranks)]
        self.generations = [self._rank(GENERATION, f"g{n}") for n in range(ranks)]

    @property
    def ranks(self) -> list[Rank]:
        """Processes that may be alive."""
        return [*self.contexts, *self.generations]

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
                    f"{handled.process.name} {session.session}: {handled.before.name} "
                    f"{type(event).__name__} -> {after}"
                )
            lines.append(f"{now_ms:6} ms  {text}")
        return "\n".join(lines)

    # What goes wrong.

    def kill(self, rank: Rank) -> None:
        """The process is gone; its peers notice, and sooner or later are told, or are not."""
        process = rank.process
        if not process.alive:
            return
        self.tell(f"{process.name} dies")
        self.faults["kill"] += 1
        process.alive = False
        for pair in rank.agent.pairs:
            wait_ms = self.rng.randint(*self.weather.notice_ms)
            self.clock.after(
                wait_ms, partial(pair.link.close, 1 - process.side, "connection reset")
            )
        if self.deaths_are_known:
            self.tell_death(rank)

    def tell_death(self, dead: Rank) -> None:
        """Whoever started the process tells the others of its death."""
        for peer in self.ranks:
            wait_ms = self.rng.randint(*self.weather.death_told_ms)
            incarnation = dead.process.incarnation
            self.clock.after(
                wait_ms,
                partial(peer.process.run, partial(peer.agent.peer_known_dead, incarnation)),
            )

    def restart(self, rank: Rank) -> None:
        """A new process takes the place of a dead one."""
        if rank.process.alive or rank in self.buried:
            return
        side = rank.process.side
        place = self.contexts if side == CONTEXT else self.generations
        fresh = self._rank(side, rank.process.incarnation.instance)
        self.tell(f"{fresh.process.name} starts")
        self.faults["restart"] += 1
        self.buried.append(rank)
        place[place.index(rank)] = fresh

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

    def start(self, request_id: str, script: Script, context: Rank, generation: Rank) -> None:
        """The generation engine grants."""
        if not generation.process.alive:
            return
        self.tell(f"{request_id}: {context.process.name} to {generation.process.name}")
        self._scripts[request_id] = script
        request = Request(request_id, script, context, generation, self.clock.now_ms)
        self.requests.append(request)
        for side, at_ms, deed in script.deeds:
            rank = (context, generation)[side]
            self.clock.after(at_ms, partial(self.act, rank, request_id, deed))
        generation.process.run(partial(self._dial, request))

    def act(self, rank: Rank, request_id: str, deed: str) -> None:
        """Cancel or fail a request at one rank, whether it is known there or not."""
        verb = rank.agent.cancel if deed == "cancel" else rank.agent.fail
        if rank.process.alive:
            self.tell(f"{rank.process.name}: {deed} {request_id}")
            rank.process.run(partial(verb, request_id, deed))

    def _dial(self, request: Request) -> None:
        request.generation.engine.expect(request.request_id)
        if request.generation.agent.dial(request.request_id):
            self._grant(request)

    def _grant(self, request: Request) -> None:
        """Over the connection there is, or a new one, as soon as the last one is through."""
        agent, request_id = request.generation.agent, request.request_id
        if request_id not in agent.dialling:
            return
        left_ms = request.started_ms + request.script.deadline_ms - self.clock.now_ms
        if left_ms <= 0:
            agent.no_connection(request_id)
            return
        pair = self._pair(request.context, request.generation)
        if pair is None:
            wait_ms = min(left_ms, self.rng.randint(*DIAL_MS))
            again = partial(request.generation.process.run, partial(self._grant, request))
            self.clock.after(wait_ms, again)
        else:
            agent.grant(request_id, pair, len(request.script.prompt), left_ms)

    def _pair(self, context: Rank, generation: Rank) -> SimPair | None:
        """The generation's end of an open link to the context, if one can be had."""
        peer = context.process.incarnation
        mine = [pair for pair in generation.agent.pairs if pair.incarnation == peer]
        if mine and mine[-1].open:
            return mine[-1]
        if not context.process.alive or context.process.paused:
            return None
        own = generation.process.incarnation
        theirs = [pair for pair in context.agent.pairs if pair.incarnation == own]
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
        for rank, other in (ends, ends[::-1]):
            pair = SimPair(rank.agent, link, other.process.incarnation, self.terrain.plan)
            rank.agent.pairs.append(pair)
            link.deliver.append(partial(self._deliver, pair))
            link.closed.append(partial(self._link_closed, pair))
        return generation.agent.pairs[-1]

    def _deliver(self, pair: SimPair, message: SessionMessage) -> None:
        pair.process.run(partial(pair.received, message))

    def _link_closed(self, pair: SimPair, reason: str) -> None:
        pair.process.run(partial(pair.link_closed, reason))

    def _rank(self, side: int, name: str) -> Rank:
        self._nonces += 1
        incarnation = Incarnation(instance=name, nonce=str(self._nonces))
        process = Process(side, incarnation, self.clock, self.rng)
        layout = self.terrain.layouts[side]
        plan = self.terrain.plan
        in_turn = partial(process.in_turn, (0, self.terrain.pass_ms))
        staging = SimStaging(plan.message_bytes, in_turn) if plan.stages else None
        memory = StampedMemory(layout, staging)
        agent = SimAgent(
            process,
            memory,
            self.terrain.views[side],
            self.terrain.costs,
            self.watches,
            self._handled,
        )
        slots = (self._slots,) * len(layout.pool_groups)
        engine = SimEngine(
            process, layout, slots, memory, agent, self._scripts.__getitem__, self._hears_ms
        )
        return Rank(process, memory, agent, engine)

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
        for dead in [*self.buried, *(rank for rank in self.ranks if not rank.process.alive)]:
            self.tell_death(dead)
        self.clock.run()
        while doubted := self._doubted():
            # Somebody has to prove it: one of two processes that doubt each other is ended.
            self.tell(f"{doubted.process.name} is ended")
            doubted.process.alive = False
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

    def _doubted(self) -> Rank | None:
        """A process that another is in doubt of."""
        for rank in self.ranks:
            for pair in rank.agent.pairs if rank.process.alive else ():
                if pair.sessions or not (pair.posts.settled or pair.open):
                    found = [
                        one for one in self.ranks if one.process.incarnation == pair.incarnation
                    ]
                    return next(one for one in found if one.process.alive)
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
        """What the sender believes received was received; it is decoded once at most."""
        context, generation = request.context, request.generation
        request_id = request.request_id
        heard = generation.engine.heard.get(request_id)
        received = [end for end in self.ends(generation, request_id) if _is_received(end)]
        if heard is not None and generation.process.alive:
            assert heard.handoffs == len(received), "handed off and ended differ"
        believed = [end for end in self.ends(context, request_id) if _is_received(end)]
        others = [
            other for other in self.requests if other.request_id == request_id and other != request
        ]
        if generation.process.alive and not others:
            assert len(believed) <= len(received), "the sender thinks it was received, it was not"

    def _check_deadline(self, request: Request) -> None:
        generation = request.generation
        heard = generation.engine.heard.get(request.request_id)
        if heard is None or generation.process.was_paused:
            return
        if len(heard.ended_ms) == 1:
            deadline_ms = request.started_ms + request.script.deadline_ms
            assert heard.ended_ms[0] <= deadline_ms, f"{request.request_id} ended late"

    def ends(self, rank: Rank, request_id: str) -> list[SessionEnded]:
        """How the sessions of a request ended at a rank."""
        heard = rank.engine.heard.get(request_id)
        return heard.ends if heard is not None else []


def _is_received(end: SessionEnded) -> bool:
    return end.outcome is Outcome.SUCCEEDED and end.reason == "received"
