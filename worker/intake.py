"""What reaches the engine, turned into legs and changes of legs.

A request that is refused gets its terminal event here and never becomes a leg; one that is accepted
gets its by ``Desk.end``. Nothing a front end sends can raise out of here.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from worker.admission import Bounds, Checked, Rejected, check
from worker.context import ContextRole
from worker.desk import CANCELLED, Desk, Ending
from worker.generation import GenerationRole
from worker.inbox import Command
from worker.messages import Cancel, Generate, Leg, LegEnded, Prefill, Stop, Warm
from worker.requests import LegRecord, LegState
from worker.served_pulls import ServedPulls

DEADLINE = Ending("failed", "deadline", "the deadline of the request has passed")


@dataclass(frozen=True, eq=False, slots=True)
class Intake:
    """Entrance of the engine."""

    desk: Desk
    context: ContextRole
    generation: GenerationRole
    served: ServedPulls
    bounds: Bounds

    def command(self, connection: int, message: Command) -> None:
        """Act on a message of a front end."""
        match message:
            case Prefill():
                self._prefill(connection, message)
            case Generate():
                self._generate(connection, message)
            case Cancel():
                self._cancel(message.request_id)
            case Stop():
                self._stop(message)
            case Warm():
                ranks = [rank for peer in message.peers for rank in peer.ranks]
                self.desk.transfers.keep_warm(ranks)

    def connection_lost(self, connection: int) -> None:
        """Nobody waits for these requests any more."""
        for leg in self.desk.legs.of_connection(connection):
            self.desk.end(leg, Ending("cancelled", "front_end_lost", "the front end is gone"))
        self.desk.outbox.forget(connection)

    def agent_event(self, event: AgentEvent) -> None:
        """Act on what the transfer agent says."""
        match event:
            case GrantReceived():
                self.context.grant_received(event)
            case AnnounceReceived():
                self.generation.announced(event.request_id)
            case ChunkReceived():
                pass  # the handoff says that every page is in; nothing starts before it
            case PullReceived():
                self.served.pull_received(event)
            case PrefixFoundReceived():
                self.context.pulls.found(event)
            case HandoffReceived() if event.request_id in self.context.pulls:
                self.context.pulls.received(event)
            case HandoffReceived():
                self.generation.handed_off(event)
            case NoDecodeReceived():
                self.generation.no_decode(event.request_id)
            case SessionEnded():
                self._session_ended(event)
            case LeaseEnded():
                self.desk.leases.ended(event.lease)
            case LeaseInDoubt():
                self.desk.leases.in_doubt(event.lease)

    def expire(self) -> None:
        """Everything that time ends."""
        now_ms = self.desk.clock.now_ms()
        for leg in self.desk.legs.overdue(now_ms):
            self.desk.end(leg, DEADLINE)
        self.context.expire(now_ms)
        self.generation.expire(now_ms)

    def next_expiry_ms(self) -> int | None:
        """When ``expire`` next has something to do."""
        times = (
            self.desk.legs.next_deadline_ms(),
            self.context.next_expiry_ms(),
            self.generation.next_expiry_ms(),
        )
        return min((time for time in times if time is not None), default=None)

    def _prefill(self, connection: int, message: Prefill) -> None:
        checked = self._checked(connection, "context", message)
        if checked is None:
            return
        leg = self._leg(connection, "context", message, checked, state=LegState.AWAITING_GRANT)
        leg.destination = message.destination
        leg.prefix_source = message.prefix_source
        if self._taken(leg):
            return
        self.desk.legs.add(leg)
        self.context.accept(leg)

    def _generate(self, connection: int, message: Generate) -> None:
        checked = self._checked(connection, "generation", message)
        if checked is None:
            return
        state = LegState.COMPUTING if message.source is None else LegState.AWAITING_ROOM
        leg = self._leg(connection, "generation", message, checked, state=state)
        leg.source = message.source
        leg.open_choices.difference_update(message.finished)
        if self._taken(leg):
            return
        self.desk.legs.add(leg)
        self.generation.accept(leg, checked.emitted)

    def _checked(self, connection: int, kind: Leg, message: Prefill | Generate) -> Checked | None:
        desk = self.desk
        request_id = message.request_id
        if desk.legs.get(kind, request_id) is not None:
            text = f"a {kind} leg of {request_id} is already on this worker"
            self._refuse(
                connection, kind, request_id, Ending("rejected", "duplicate_request", text)
            )
            return None
        try:
            checked = check(message, self.bounds)
        except Rejected as error:
            self._refuse(connection, kind, request_id, Ending("rejected", error.code, str(error)))
            return None
        if desk.legs.was_cancelled(request_id):
            self._refuse(connection, kind, request_id, CANCELLED)
            return None
        return checked

    def _taken(self, leg: LegRecord) -> bool:
        """Whether an old transfer of the same request is still ending: its events could not be told
        apart.
        """
        waits_for_grant = leg.kind == "context" and self.context.remembers(leg.request_id)
        if not leg.uses_transfer or waits_for_grant:
            return False
        if not self.desk.leases.has_session(leg.request_id):
            return False
        message = "an earlier transfer of this request is still ending on this worker"
        ending = Ending("failed", "session_busy", message, retryable=True)
        self._refuse(leg.front_end, leg.kind, leg.request_id, ending)
        return True

    def _refuse(self, connection: int, kind: Leg, request_id: str, ending: Ending) -> None:
        if kind == "context" and self.desk.legs.get("context", request_id) is None:
            self.context.refused(request_id)
        self.desk.outbox.ended(
            connection,
            LegEnded(
                request_id=request_id,
                leg=kind,
                outcome=ending.outcome,
                code=ending.code,
                message=ending.message,
                retryable=ending.retryable,
            ),
        )

    def _leg(
        self,
        connection: int,
        kind: Leg,
        message: Prefill | Generate,
        checked: Checked,
        *,
        state: LegState,
    ) -> LegRecord:
        return LegRecord(
            kind=kind,
            request_id=message.request_id,
            front_end=connection,
            arrival=self.desk.legs.next_arrival(),
            prompt=checked.prompt,
            scope=message.scope,
            sampling=message.sampling,
            stop=message.stop,
            n=message.n,
            deadline_at_ms=self.desk.clock.now_ms() + message.deadline_ms,
            output_limit=checked.output_limit,
            state=state,
            open_choices=set(range(message.n)),
        )

    def _cancel(self, request_id: str) -> None:
        legs = self.desk.legs.of(request_id)
        for leg in legs:
            self.desk.end(leg, CANCELLED)
        if not legs:
            self.desk.legs.remember_cancel(request_id, self.desk.clock.now_ms())
            self.context.refused(request_id)

    def _stop(self, message: Stop) -> None:
        leg = self.desk.legs.get("generation", message.request_id)
        if leg is not None and message.choice in leg.open_choices:
            self.generation.stop(leg, message.choice)

    def _session_ended(self, event: SessionEnded) -> None:
        desk = self.desk
        desk.leases.close_session(event.request_id)
        desk.counters.transferred_bytes += event.transferred_bytes
        desk.counters.transferred_blocks += event.transferred_blocks
        self.context.forget_grant(event.request_id)
        if event.request_id in self.context.pulls:
            self.context.pulls.ended(event)
        if event.request_id in self.served:
            self.served.ended(event)
        for leg in desk.legs.of(event.request_id):
            if not leg.uses_transfer:
                continue
            leg.transferred_bytes += event.transferred_bytes
            role = self.context if leg.kind == "context" else self.generation
            role.session_ended(leg, event)
