"""A deterministic world for request flows: workers, connections, a router and time, all driven by
one seed.

Each connection keeps its own order and has its own delays, so messages of different workers
overtake each other. A worker repeats what it said, dies at any moment with messages in flight, and
comes back as a new incarnation. Tokens carry the attempt that made them (``token + 1000 *
attempt``): a mixture of two attempts would show.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.conversation import ConversationRouter, RouterSettings
from router.placement import NoWorkerError, Placement, RouteRequest
from router.rules import LoadRule, RuleSettings
from router.snapshots import Role, WorkerSnapshot
from services.orchestration.api import OutputEvent
from services.orchestration.flow import FlowPlan, RequestFlow
from services.orchestration.flow_states import (
    CancelLegs,
    ConfirmPlacement,
    Emit,
    FindWorker,
    FlowCommand,
    FlowEvent,
    FlowState,
    Forget,
    LegReport,
    RecordConflict,
    RecordRepair,
    ReleasePrefill,
    ReleaseSequence,
    StartGenerate,
    StartPrefill,
    StopChoice,
    WorkerFound,
    WorkerJoined,
    WorkerLost,
    WorkerMissing,
)
from tests.sim.flow_requests import PROMPT_TOKENS, SimClock, SimRequest
from transfer.identity import Incarnation
from transfer.wire import pack_ints
from worker.messages import Leg, LegEnded, LegStarted
from worker.token_runs import FinishReason, TokenRun

ATTEMPT = 1000


@dataclass
class SimFaults:
    """How unkind the world is; rates are per leg or per message."""

    delay: float = 0.05
    duplicate_rate: float = 0.2
    fail_rate: float = 0.1
    reject_rate: float = 0.02
    death_at: list[tuple[float, str]] = field(default_factory=list)
    revival_after: float | None = 1.0


class SimLeg:
    """One leg on one worker."""

    def __init__(self, leg_id: str, kind: Leg, request: SimRequest) -> None:
        self.leg_id = leg_id
        self.kind: Leg = kind
        self.request = request
        self.over = False
        self.next = [0] * request.n
        self.going = set(range(request.n))
        self.stops: dict[int, int] = {}

    @property
    def attempt(self) -> int:
        _, _, suffix = self.leg_id.partition(".")
        return int(suffix or 0)

    def run(self, choice: int, length: int) -> TokenRun:
        """The next tokens of a choice, at most ``length``."""
        index = start = self.next[choice]
        tokens: list[int] = []
        finish: FinishReason | None = None
        while len(tokens) < length and finish is None:
            tokens.append(self.request.token(choice, index) + ATTEMPT * self.attempt)
            finish = self.request.finish_after(choice, index)
            index += 1
        self.next[choice] = index
        if finish is not None:
            self.going.discard(choice)
        return TokenRun(
            request_id=self.leg_id,
            choice=choice,
            start=start,
            tokens=pack_ints(tokens),
            finish=finish,
        )


class SimWorker:
    """One incarnation with one connection to the front end."""

    CONTEXT_CACHED = 32
    GENERATION_CACHED = 64

    def __init__(self, world: SimWorld, incarnation: Incarnation, role: Role) -> None:
        self.world = world
        self.incarnation = incarnation
        self.role: Role = role
        self.alive = True
        self.legs: dict[tuple[str, Leg], SimLeg] = {}
        self._cancelled: set[str] = set()
        self._inbound_free = 0.0
        self._outbound_free = 0.0

    def receive(self, action: Callable[[], None]) -> None:
        """A command of the front end: arrives later, in order, if the worker still lives."""
        self._inbound_free = max(self._inbound_free, self.world.clock.now + self.world.delay())
        self.world.clock.at(self._inbound_free, lambda: action() if self.alive else None)

    def say(
        self,
        started: tuple[LegStarted, ...] = (),
        runs: tuple[TokenRun, ...] = (),
        ended: tuple[LegEnded, ...] = (),
    ) -> None:
        """One step message: arrives later, in order, unless the connection breaks before."""
        self._outbound_free = max(self._outbound_free, self.world.clock.now + self.world.delay())
        report = LegReport(self.incarnation, started, runs, ended)
        times = 2 if runs and self.world.chance(self.world.faults.duplicate_rate) else 1
        for copy in range(times):
            said = report if copy == 0 else LegReport(self.incarnation, (), runs, ())
            self.world.clock.at(self._outbound_free, lambda said=said: self._deliver(said))  # type: ignore[misc]

    def _deliver(self, report: LegReport) -> None:
        if self.alive:
            self.world.deliver(report)

    def die(self) -> None:
        """With everything that is in flight on the connection."""
        self.alive = False
        self.world.clock.after(self.world.delay(), lambda: self.world.lose(self))

    def begin(self, leg: SimLeg, cached: int) -> bool:
        """Whether the leg starts; otherwise its end is said."""
        faults = self.world.faults
        if leg.leg_id in self._cancelled:
            self.legs[leg.leg_id, leg.kind] = leg
            self.end(leg, "cancelled")
            return False
        self.legs[leg.leg_id, leg.kind] = leg
        if self.world.chance(faults.reject_rate):
            self.end(leg, "rejected")
            return False
        started = LegStarted(
            request_id=leg.leg_id, leg=leg.kind, prompt_tokens=PROMPT_TOKENS, cached_tokens=cached
        )
        self.say(started=(started,))
        if self.world.chance(faults.fail_rate):
            self.world.clock.after(self.world.delay(), lambda: self.end(leg, "failed"))
        return True

    def end(self, leg: SimLeg, outcome: str, runs: tuple[TokenRun, ...] = ()) -> None:
        """Say the leg's one end."""
        if leg.over or not self.alive:
            return
        leg.over = True
        del self.legs[leg.leg_id, leg.kind]
        ended = LegEnded.model_validate(
            {
                "request_id": leg.leg_id,
                "leg": leg.kind,
                "outcome": outcome,
                "code": "" if outcome == "succeeded" else "simulated",
                "retryable": outcome == "failed",
                "transferred_bytes": 7 if leg.kind == "generation" else 0,
            }
        )
        self.say(runs=runs, ended=(ended,))

    def cancel(self, leg_id: str) -> None:
        self._cancelled.add(leg_id)
        for kind in ("context", "generation"):
            leg = self.legs.get((leg_id, kind))
            if leg is not None:
                self.end(leg, "cancelled")

    def stop(self, leg_id: str, choice: int, index: int) -> None:
        leg = self.legs.get((leg_id, "generation"))
        if leg is not None:
            leg.stops[choice] = index
            leg.going.discard(choice)

    def prefill(self, leg: SimLeg, destination: SimWorker | None) -> None:
        if not self.begin(leg, cached=self.CONTEXT_CACHED):
            return

        def first_tokens() -> None:
            if leg.over or not self.alive:
                return
            runs = tuple(leg.run(choice, 1) for choice in range(leg.request.n))
            if self.world.chance(0.5):
                self.say(runs=runs)
                self.world.clock.after(self.world.delay(), lambda: hand_over(()))
            else:
                hand_over(runs)

        def hand_over(runs: tuple[TokenRun, ...]) -> None:
            if leg.over or not self.alive:
                return
            if destination is not None:
                self.world.clock.after(
                    self.world.delay(),
                    lambda: destination.pages(leg.leg_id, decode=bool(leg.going)),
                )
            self.end(leg, "succeeded", runs)

        self.world.clock.after(self.world.delay(), first_tokens)

    def generate(self, leg: SimLeg, source: SimWorker | None) -> None:
        if not self.begin(leg, cached=self.GENERATION_CACHED):
            return
        if source is None:
            self.world.clock.after(self.world.delay(), lambda: self.decode(leg))
            return
        # Pages come through ``pages``; without them the leg fails after its source is gone.
        self.world.watch(source, leg.leg_id, lambda: self.end(leg, "failed"))
        if (leg.leg_id, self.incarnation) in self.world.arrived:
            self.pages(leg.leg_id, decode=self.world.arrived[leg.leg_id, self.incarnation])

    def pages(self, leg_id: str, *, decode: bool) -> None:
        """The pages of a request are here, or it was said that none will come."""
        self.world.arrived[leg_id, self.incarnation] = decode
        leg = self.legs.get((leg_id, "generation"))
        if leg is None or leg.over or not self.alive:
            return
        if decode:
            self.decode(leg)
        else:
            self.end(leg, "succeeded")

    def decode(self, leg: SimLeg) -> None:
        """One step, then the next one."""
        if leg.over or not self.alive:
            return
        runs = tuple(
            leg.run(choice, self.world.rng.choice((1, 1, 1, 3))) for choice in sorted(leg.going)
        )
        if leg.going:
            self.say(runs=runs)
            self.world.clock.after(self.world.delay(), lambda: self.decode(leg))
        else:
            self.end(leg, "succeeded", runs)


@dataclass
class SimOutcome:
    """What the client of one request saw."""

    request: SimRequest
    events: list[OutputEvent] = field(default_factory=list)
    repairs: int = 0
    conflicts: int = 0
    forgotten: bool = False


class SimWorld:
    """Front end, router and workers."""

    def __init__(self, seed: int, faults: SimFaults) -> None:
        self.rng = random.Random(seed)
        self.clock = SimClock()
        self.faults = faults
        self.workers: dict[Incarnation, SimWorker] = {}
        self.arrived: dict[tuple[str, Incarnation], bool] = {}
        self.outcomes: dict[str, SimOutcome] = {}
        rule = self.rng.choice(list(LoadRule))
        self.router = ConversationRouter(RouterSettings(rules=RuleSettings(rule=rule)))
        self._flows: dict[str, RequestFlow] = {}
        self._owners: dict[str, str] = {}
        self._placements: dict[str, Placement] = {}
        self._connected: set[Incarnation] = set()
        self._watches: list[tuple[SimWorker, Callable[[], None]]] = []
        self._boots = itertools.count()

    def chance(self, rate: float) -> bool:
        return self.rng.random() < rate

    def delay(self) -> float:
        return self.rng.random() ** 3 * self.faults.delay + 1e-6

    def add_worker(self, instance: str, role: Role) -> None:
        """A new incarnation joins."""
        incarnation = Incarnation(instance=instance, nonce=str(next(self._boots)))
        self.workers[incarnation] = SimWorker(self, incarnation, role)
        self._connected.add(incarnation)
        for request_id in tuple(self._flows):
            self.feed(request_id, WorkerJoined())

    def kill(self, instance: str) -> None:
        """The living incarnation of an instance dies, and may come back."""
        for worker in tuple(self.workers.values()):
            if worker.incarnation.instance == instance and worker.alive:
                worker.die()
                if self.faults.revival_after is not None:
                    revival = self.faults.revival_after * self.rng.random()
                    role = worker.role
                    self.clock.after(revival, lambda role=role: self.add_worker(instance, role))  # type: ignore[misc]

    def lose(self, worker: SimWorker) -> None:
        """The front end and the peers see that a connection broke."""
        self._connected.discard(worker.incarnation)
        for request_id in tuple(self._flows):
            self.feed(request_id, WorkerLost(worker.incarnation))
        for source, fail in tuple(self._watches):
            if source is worker:
                self.clock.after(self.delay(), fail)
        self.router.lost(worker.incarnation)

    def watch(self, source: SimWorker, leg_id: str, fail: Callable[[], None]) -> None:
        """Call ``fail`` when the pages of a leg cannot come any more: its source died or gave it
        up.
        """

        def poll() -> None:
            leg_gone = (leg_id, "context") not in source.legs
            started = leg_id in source._cancelled or not source.alive
            if leg_gone and started:
                fail()

        self._watches.append((source, fail))
        for step in range(1, 40):
            self.clock.after(step * self.faults.delay, poll)

    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        return tuple(
            WorkerSnapshot(incarnation=entry, role=self.workers[entry].role)
            for entry in self.workers
            if entry in self._connected
        )

    def submit(self, request: SimRequest) -> None:
        """Place a request, or drop it when there is nobody."""
        route = RouteRequest(
            request_id=request.request_id,
            prompt_tokens=PROMPT_TOKENS,
            max_output_tokens=request.max_tokens,
            n=request.n,
            conversation_id=f"conversation-{request.seed % 3}",
        )
        try:
            placement = self.router.place(route, self.snapshots())
        except NoWorkerError:
            return
        self.router.reserve(placement)
        plan = FlowPlan(
            request_id=request.request_id,
            prompt_tokens=PROMPT_TOKENS,
            n=request.n,
            context=placement.context,
            generation=placement.generation,
        )
        self._flows[request.request_id] = RequestFlow(plan)
        self._owners[request.request_id] = request.request_id
        self._placements[request.request_id] = placement
        self.outcomes[request.request_id] = SimOutcome(request)

    def feed(self, request_id: str, event: FlowEvent) -> None:
        """Events for requests that are gone are dropped, as the shell does."""
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if isinstance(event, WorkerJoined) and flow.state is not FlowState.SEEKING:
            return
        for command in flow.handle(event):
            self.execute(request_id, command)
        self.router.ledger.check()

    def deliver(self, report: LegReport) -> None:
        """A report arrives at the front end."""
        ids = [started.request_id for started in report.started]
        ids += [run.request_id for run in report.runs]
        ids += [ended.request_id for ended in report.ended]
        owner = self._owners.get(ids[0])
        if owner is not None:
            self.feed(owner, report)

    def execute(self, request_id: str, command: FlowCommand) -> None:
        outcome = self.outcomes[request_id]
        request = outcome.request
        match command:
            case StartPrefill():
                target = None if command.destination is None else self.workers[command.destination]
                worker = self.workers[command.worker]
                leg = SimLeg(command.leg_id, "context", request)
                worker.receive(lambda: worker.prefill(leg, target))
            case StartGenerate():
                source = None if command.source is None else self.workers[command.source]
                generator = self.workers[command.worker]
                made = SimLeg(command.leg_id, "generation", request)
                for choice, emitted in enumerate(command.emitted):
                    made.next[choice] = len(emitted)
                made.going -= set(command.finished)
                generator.receive(lambda: generator.generate(made, source))
            case CancelLegs():
                cancelled = self.workers[command.worker]
                cancelled.receive(lambda: cancelled.cancel(command.leg_id))
            case StopChoice():
                stopped = self.workers[command.worker]
                stopped.receive(lambda: stopped.stop(command.leg_id, command.choice, command.index))
            case Emit():
                outcome.events.append(command.event)
            case ReleasePrefill():
                self.router.release(command.leg_id, "prefill")
            case ReleaseSequence():
                self.router.release(command.leg_id, "sequence")
            case FindWorker():
                self._find_worker(request_id, command)
            case ConfirmPlacement():
                self.router.succeeded(self._placements[request_id])
            case RecordRepair():
                outcome.repairs += 1
            case RecordConflict():
                outcome.conflicts += 1
            case Forget():
                outcome.forgotten = True
                del self._flows[request_id]

    def _find_worker(self, request_id: str, command: FindWorker) -> None:
        route = RouteRequest(
            request_id=command.leg_id, prompt_tokens=PROMPT_TOKENS, excluded=command.avoid
        )
        snapshots = self.snapshots()
        if not snapshots:
            self.feed(request_id, WorkerMissing())
            return
        placement = self.router.place_repair(route, snapshots, command.preferred)
        self.router.reserve(placement)
        self._placements[request_id] = placement
        self._owners[command.leg_id] = request_id
        assert placement.generation is not None
        self.feed(request_id, WorkerFound(placement.generation))

    @property
    def idle(self) -> bool:
        """Whether every flow was forgotten."""
        return not self._flows
