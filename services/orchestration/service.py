"""The asyncio shell around flows, router and links: everything that has a clock or a socket.

All state belongs to one event loop. Events go into a request's flow and its commands are carried
out in order; whatever happens to workers, every accepted request has an end before its deadline has
passed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from prometheus_client import CollectorRegistry
from typing_extensions import override

from kvcache_core.hashing import prefix_keys
from router.conversation import ConversationRouter, RouterSettings
from router.placement import NoWorkerError, Placement, RouteRequest
from router.prefix_index import KEY_BYTES
from services.orchestration.active import ActiveRequest
from services.orchestration.admission import Admission, check_request
from services.orchestration.api import (
    ChoiceFinished,
    Completed,
    Failed,
    GenerationRequest,
    GenerationService,
    InvalidRequest,
    ModelLimits,
    NotReady,
    OutputEvent,
    OutputStream,
    Overloaded,
    Readiness,
    TokenDelta,
)
from services.orchestration.canary import Canary, CanarySettings
from services.orchestration.cluster import Cluster, ClusterListener
from services.orchestration.flow_states import (
    Begin,
    CancelLegs,
    CancelRequested,
    ConfirmPlacement,
    DeadlinePassed,
    Emit,
    FindWorker,
    FlowCommand,
    FlowEvent,
    FlowState,
    Forget,
    InvalidTransition,
    LegReport,
    RecordConflict,
    RecordRepair,
    ReleasePrefill,
    ReleaseSequence,
    StartGenerate,
    StartPrefill,
    StopChoice,
    StopRequested,
    WorkerFound,
    WorkerJoined,
    WorkerLost,
    WorkerMissing,
)
from services.orchestration.meter import RequestMeter
from services.orchestration.metrics import RequestMetrics, WorkerCollector
from services.orchestration.progress import Progress
from services.orchestration.reports import reports_by_leg
from services.orchestration.stream import RequestStream, StreamControl
from services.orchestration.worker_link import LinkTimings
from transfer.identity import Incarnation
from worker.config import WorkerAddress
from worker.messages import Cancel, Leg, LegEnded, LegPlaced, PrefixSource, StepOutput, Stop

logger = logging.getLogger(__name__)

SHUTTING_DOWN: Final = Failed("shutting_down", "the server is shutting down", 503, retry_after_s=1)
HASH_IN_THREAD_TOKENS: Final = 8192
"""Longer prompts are hashed off the event loop."""


@dataclass(frozen=True, kw_only=True)
class OrchestratorSettings:
    """Options of the shell."""

    cluster_token: str = field(repr=False)
    front_end: str = "front-end"
    expected_instances: tuple[str, ...] = ()
    """Not ready before each of these has been connected once."""
    max_in_flight: int = 512
    router: RouterSettings = field(default_factory=RouterSettings)
    """``tokens_per_block`` is replaced by that of the workers."""
    timings: LinkTimings = field(default_factory=LinkTimings)
    canary: CanarySettings = field(default_factory=CanarySettings)


class Orchestrator(GenerationService, ClusterListener, StreamControl):
    """The cluster behind one front end. Made in its event loop; ``start`` before and ``close``
    after use.
    """

    def __init__(self, settings: OrchestratorSettings, *, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._router = ConversationRouter(settings.router)
        self._cluster = Cluster(
            self,
            front_end=settings.front_end,
            cluster_token=settings.cluster_token,
            timings=settings.timings,
            expected_instances=settings.expected_instances,
        )
        self._admission = Admission(settings.max_in_flight)
        self._meter = RequestMeter(RequestMetrics(registry))
        self._workers = WorkerCollector(self._cluster.statuses)
        registry.register(self._workers)
        self._active: dict[str, ActiveRequest] = {}
        self._by_leg: dict[str, ActiveRequest] = {}
        self._progress = Progress()
        self._canary = Canary(self, settings.canary)
        self._closing = False

    async def start(self) -> None:
        """Begin to prove readiness. Workers are connected as :meth:`set_workers` names them."""
        self._canary.start()

    async def close(self) -> None:
        """End every request with an error and every connection. Drain before, if that is wanted."""
        self._closing = True
        await self._canary.close()
        for active in tuple(self._active.values()):
            self._feed(active, CancelRequested(SHUTTING_DOWN))
        await self._cluster.close()

    def set_workers(self, addresses: Iterable[WorkerAddress]) -> None:
        """The live workers of the cluster, all of them; to be called in the event loop."""
        self._cluster.set_workers(addresses)

    @property
    def in_flight(self) -> int:
        """Accepted requests whose terminal event is not out, canaries included."""
        return self._admission.in_flight

    @property
    def router(self) -> ConversationRouter:
        """For checks and diagnosis."""
        return self._router

    @override
    async def submit(self, request: GenerationRequest) -> OutputStream:
        try:
            check_request(request, self.limits())
            self._require_worker()
            self._admission.enter()
        except (Overloaded, NotReady, InvalidRequest) as error:
            self._meter.refused(request.endpoint, error)
            raise
        try:
            keys = await self._keys(request)
            self._require_worker()
            active = self._place(request, keys)
        except BaseException:
            self._admission.leave(self._now_s())
            raise
        self._meter.accepted(active)
        self._feed(active, Begin())
        return active.stream

    @override
    def limits(self) -> ModelLimits:
        limits = self._cluster.limits()
        if limits is None:
            raise NotReady(self._cluster.missing())
        return limits

    @override
    def readiness(self) -> Readiness:
        reasons = self.missing()
        if not reasons and self._canary.failure:
            reasons = (self._canary.failure,)
        degraded = () if reasons else self._cluster.degraded()
        return Readiness(not reasons, reasons, self._cluster.statuses(), degraded)

    def missing(self) -> tuple[str, ...]:
        """Why no request can be served, the canary aside."""
        if self._closing:
            return ("the server is shutting down",)
        return self._cluster.missing()

    def vocab_size(self) -> int:
        """Of the model that the workers serve."""
        return self.limits().vocab_size

    def stalled(self, request_id: str, since_s: float) -> tuple[str, ...]:
        """Workers that have had work since then and did not move: whom the request waits for, and
        whoever runs sequences.
        """
        progress = self._progress
        workers = {
            link.incarnation
            for link in self._cluster.links()
            if link.up and progress.stands_still(link.incarnation, since_s)
        }
        active = self._active.get(request_id)
        if active is not None and active.waits_since_s <= since_s:
            waits_for = active.waits_for()
            if not waits_for:
                return ("no worker takes it",)
            workers.update(w for w in waits_for if not progress.moved(w, since_s))
        return tuple(f"worker {worker} makes no progress" for worker in sorted(workers, key=str))

    @override
    def stop(self, request_id: str, choice: int, index: int) -> None:
        active = self._active.get(request_id)
        if active is not None:
            self._feed(active, StopRequested(choice, index))

    @override
    def cancel(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is not None:
            self._feed(active, CancelRequested())

    @override
    def worker_joined(self, worker: Incarnation) -> None:
        self._canary.workers_changed()
        for active in tuple(self._active.values()):
            if active.flow.state is FlowState.SEEKING:
                self._feed(active, WorkerJoined())

    @override
    def worker_step(self, worker: Incarnation, output: StepOutput) -> None:
        self._progress.observe(worker, output, self._now_s())
        if output.gauges is not None:
            self._workers.observe(worker, output.gauges)
        for placed in output.placed:
            self._leg_placed(worker, placed)
        for leg_id, report in reports_by_leg(worker, output):
            active = self._by_leg.get(leg_id)
            if active is not None:
                active.legs_ended(report.ended, self._now_s())
                self._meter.legs_ended(active, report)
                self._feed(active, report)

    @override
    def worker_lost(self, worker: Incarnation) -> None:
        self._canary.workers_changed()
        for active in tuple(self._active.values()):
            active.worker_lost(worker, self._now_s())
            if active.held is not None and active.held.worker == worker:
                active.held = None
            self._feed(active, WorkerLost(worker))

    @override
    def worker_removed(self, worker: Incarnation) -> None:
        self._progress.forget(worker)
        self._workers.fold(worker)
        self._router.lost(worker)

    def _require_worker(self) -> None:
        if self._closing:
            raise NotReady(("the server is shutting down",))
        if not self._cluster.can_serve():
            raise NotReady(self._cluster.missing() or ("no worker is ready",))

    async def _keys(self, request: GenerationRequest) -> tuple[bytes, ...]:
        block = self.limits().tokens_per_block
        if len(request.tokens) > HASH_IN_THREAD_TOKENS:
            keys = await asyncio.to_thread(prefix_keys, request.scope, request.tokens, block)
        else:
            keys = prefix_keys(request.scope, request.tokens, block)
        return tuple(key[:KEY_BYTES] for key in keys)

    def _place(self, request: GenerationRequest, keys: tuple[bytes, ...]) -> ActiveRequest:
        self._adopt_block_size()
        route = RouteRequest(
            request_id=secrets.token_hex(12),
            prompt_tokens=len(request.tokens),
            keys=keys,
            max_output_tokens=request.stop.max_tokens,
            n=request.n,
            conversation_id=request.conversation_id,
        )
        snapshots = self._cluster.snapshots()
        placement = self._router.place(route, snapshots)
        self._router.reserve(placement, snapshots)
        now_s = self._now_s()
        stream = RequestStream(route.request_id, self)
        active = ActiveRequest(request, route, placement, stream, now_s)
        active.timer = asyncio.get_running_loop().call_at(
            active.deadline_s, self._deadline, route.request_id
        )
        self._active[route.request_id] = active
        self._own(active, route.request_id)
        return active

    def _adopt_block_size(self) -> None:
        block = self.limits().tokens_per_block
        if self._router.settings.tokens_per_block != block and not self._active:
            self._router = ConversationRouter(
                replace(self._settings.router, tokens_per_block=block)
            )

    def _own(self, active: ActiveRequest, leg_id: str) -> None:
        active.leg_ids.append(leg_id)
        self._by_leg[leg_id] = active

    def _deadline(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is not None:
            self._feed(active, DeadlinePassed())

    def _feed(self, active: ActiveRequest, event: FlowEvent) -> None:
        try:
            commands = active.flow.handle(event)
        except InvalidTransition:
            logger.exception("request %s ends: its flow is broken", active.request_id)
            commands = active.flow.abort("the server made an error with this request")
        for command in commands:
            self._execute(active, command)

    def _execute(self, active: ActiveRequest, command: FlowCommand) -> None:  # noqa: C901  a table
        match command:
            case Emit():
                self._emit(active, command.event)
            case StartPrefill():
                self._start_prefill(active, command)
            case StartGenerate():
                self._start_generate(active, command)
            case CancelLegs():
                self._cancel_legs(active, command)
            case StopChoice():
                stop = Stop(request_id=command.leg_id, choice=command.choice, index=command.index)
                self._send_if_up(command.worker, stop)
            case ReleasePrefill():
                self._router.release(command.leg_id, "prefill")
            case ReleaseSequence():
                self._router.release(command.leg_id, "sequence")
            case FindWorker():
                self._find_worker(active, command)
            case ConfirmPlacement():
                active.confirmed = True
                self._router.succeeded(active.placement)
            case RecordRepair():
                logger.warning("request %s is repaired: %s", active.request_id, command.cause)
                self._meter.repaired(command.cause)
            case RecordConflict():
                logger.error(
                    "request %s: workers disagree about token %d of choice %d",
                    *(active.request_id, command.index, command.choice),
                )
                self._meter.conflict()
            case Forget():
                self._forget(active)
            case _:
                assert_never(command)

    def _start_prefill(self, active: ActiveRequest, command: StartPrefill) -> None:
        link = self._cluster.link(command.worker)
        if link is None:
            self._report_unsent(active, command.worker, command.leg_id, "context")
        else:
            source = self._prefix_source(active.placement)
            link.send(active.prefill_message(command, source, self._now_s()))
            active.leg_sent(command.leg_id, "context", command.worker, self._now_s())

    def _prefix_source(self, placement: Placement) -> PrefixSource | None:
        """Where the context worker finds its source; None when that worker went away meanwhile."""
        holder = placement.prefix_source
        link = None if holder is None else self._cluster.link(holder.worker)
        if holder is None or link is None or link.welcome is None:
            return None
        if link.welcome.dp_size > 1:
            return None  # which of its ranks has it is not known here
        return PrefixSource(peer=link.welcome.peer, tokens=holder.tokens)

    def _start_generate(self, active: ActiveRequest, command: StartGenerate) -> None:
        link = self._cluster.link(command.worker)
        source = None if command.source is None else self._cluster.link(command.source)
        welcome = None if source is None else source.welcome
        if link is None or (command.source is not None and welcome is None):
            self._report_unsent(active, command.worker, command.leg_id, "generation")
            return
        if welcome is not None and welcome.dp_size > 1:
            active.held = command  # until the context worker says which rank
            return
        peer = None if welcome is None else welcome.peer
        link.send(active.generate_message(command, peer, self._now_s()))
        active.leg_sent(command.leg_id, "generation", command.worker, self._now_s())

    def _leg_placed(self, worker: Incarnation, placed: LegPlaced) -> None:
        """A context leg lives on one rank: the generation leg may begin."""
        active = self._by_leg.get(placed.request_id)
        held = None if active is None else active.held
        if active is None or held is None:
            return
        if (held.leg_id, held.source) != (placed.request_id, worker):
            return
        active.held = None
        link, source = self._cluster.link(held.worker), self._cluster.link(worker)
        if link is None or source is None or source.welcome is None:
            self._report_unsent(active, held.worker, held.leg_id, "generation")
            return
        rank = source.welcome.peer.ranks[placed.rank]
        link.send(active.generate_message(held, rank, self._now_s()))
        active.leg_sent(held.leg_id, "generation", held.worker, self._now_s())

    def _cancel_legs(self, active: ActiveRequest, command: CancelLegs) -> None:
        held = active.held
        if held is not None and (held.leg_id, held.worker) == (command.leg_id, command.worker):
            # It was never sent: it is over, and nobody else will say so.
            active.held = None
            self._report_unsent(active, held.worker, held.leg_id, "generation")
            return
        self._send_if_up(command.worker, Cancel(request_id=command.leg_id))

    def _report_unsent(
        self, active: ActiveRequest, worker: Incarnation, leg_id: str, leg: Leg
    ) -> None:
        """The worker went away between placement and sending: the leg fails like any other."""
        ended = LegEnded(
            request_id=leg_id, leg=leg, outcome="failed", code="unsent", retryable=True
        )
        report = LegReport(worker, ended=(ended,))
        asyncio.get_running_loop().call_soon(self._feed, active, report)

    def _send_if_up(self, worker: Incarnation, message: Cancel | Stop) -> None:
        link = self._cluster.link(worker)
        if link is not None:
            link.send(message)

    def _find_worker(self, active: ActiveRequest, command: FindWorker) -> None:
        if not active.confirmed:
            self._router.failed(active.request_id)
        accepting = tuple(entry for entry in self._cluster.snapshots() if entry.accepting)
        route = replace(active.route, request_id=command.leg_id, excluded=command.avoid)
        try:
            placement = self._router.place_repair(route, accepting, command.preferred)
        except NoWorkerError:
            self._feed(active, WorkerMissing())
            return
        self._router.reserve(placement, accepting)
        active.placement = placement
        self._own(active, command.leg_id)
        assert placement.generation is not None
        self._feed(active, WorkerFound(placement.generation))

    def _emit(self, active: ActiveRequest, event: OutputEvent) -> None:
        match event:
            case TokenDelta():
                self._meter.delta(active, event, self._now_s())
            case ChoiceFinished():
                pass
            case Completed() | Failed():
                self._end(active, event)
        active.stream.push(event)

    def _end(self, active: ActiveRequest, event: Completed | Failed) -> None:
        now_s = self._now_s()
        self._admission.leave(now_s)
        self._meter.ended(active, event, now_s)
        blamed = isinstance(event, Failed) and event.http_status >= 500
        if blamed and not active.confirmed:
            self._router.failed(active.request_id)
        else:
            self._router.abandoned(active.request_id)
        if isinstance(event, Completed):
            self._canary.served(now_s)

    def _forget(self, active: ActiveRequest) -> None:
        if active.timer is not None:
            active.timer.cancel()
        self._active.pop(active.request_id, None)
        for leg_id in active.leg_ids:
            self._by_leg.pop(leg_id, None)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
