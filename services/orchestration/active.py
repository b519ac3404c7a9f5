"""One accepted request in the shell: its flow, its stream, and what is measured of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.placement import Placement, RouteRequest
from services.orchestration.api import GenerationRequest
from services.orchestration.flow import FlowPlan, RequestFlow
from services.orchestration.flow_states import StartGenerate, StartPrefill
from services.orchestration.stream import RequestStream
from transfer.identity import Incarnation, PeerAddress
from transfer.wire import pack_ints
from worker.messages import Generate, Leg, LegEnded, Prefill, PrefixSource


@dataclass
class ActiveRequest:
    """Everything the shell knows of a request that has not ended on every worker."""

    request: GenerationRequest
    route: RouteRequest
    placement: Placement
    """The latest one: of the request, or of its last repair."""
    stream: RequestStream
    submitted_s: float
    """In the clock of the event loop."""
    packed_tokens: bytes = field(init=False, repr=False)
    flow: RequestFlow = field(init=False)
    disaggregated: bool = field(init=False)
    """Its first placement had a context leg."""
    leg_ids: list[str] = field(default_factory=list)
    held: StartGenerate | None = None
    """A generation leg whose source, one rank of the context worker, is not known yet."""
    open_legs: dict[tuple[str, Leg], Incarnation] = field(default_factory=dict)
    """Sent and not ended: where each runs."""
    waits_since_s: float = field(init=False)
    """When a leg last began or ended."""
    timer: asyncio.TimerHandle | None = None
    confirmed: bool = False
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)
    """By choice."""

    def __post_init__(self) -> None:
        self.waits_since_s = self.submitted_s
        self.disaggregated = self.placement.context is not None
        self.packed_tokens = pack_ints(self.request.tokens)
        plan = FlowPlan(
            request_id=self.route.request_id,
            prompt_tokens=self.route.prompt_tokens,
            n=self.request.n,
            context=self.placement.context,
            generation=self.placement.generation,
        )
        self.flow = RequestFlow(plan)

    @property
    def request_id(self) -> str:
        """Minted by the front end."""
        return self.route.request_id

    @property
    def deadline_s(self) -> float:
        """In the clock of the event loop."""
        return self.submitted_s + self.request.deadline_ms / 1000

    def leg_sent(self, leg_id: str, leg: Leg, worker: Incarnation, now_s: float) -> None:
        """A worker was asked for a leg."""
        self.open_legs[leg_id, leg] = worker
        self.waits_since_s = now_s

    def legs_ended(self, ended: Iterable[LegEnded], now_s: float) -> None:
        """Workers told the end of legs."""
        for end in ended:
            if self.open_legs.pop((end.request_id, end.leg), None) is not None:
                self.waits_since_s = now_s

    def worker_lost(self, worker: Incarnation, now_s: float) -> None:
        """Every leg there is over."""
        for key in [key for key, where in self.open_legs.items() if where == worker]:
            del self.open_legs[key]
            self.waits_since_s = now_s

    def waits_for(self) -> tuple[Incarnation, ...]:
        """Whose turn it is: a generation leg waits for the context leg, if there is one."""
        contexts = tuple(where for (_, leg), where in self.open_legs.items() if leg == "context")
        return contexts or tuple(self.open_legs.values())

    def remaining_ms(self, now_s: float) -> int:
        """What a leg that starts now may take."""
        return max(1, int((self.deadline_s - now_s) * 1000))

    def prefill_message(
        self, command: StartPrefill, prefix_source: PrefixSource | None, now_s: float
    ) -> Prefill:
        """The message of a context leg."""
        request = self.request
        return Prefill(
            request_id=command.leg_id,
            tokens=self.packed_tokens,
            scope=request.scope,
            sampling=request.sampling,
            stop=request.stop,
            n=request.n,
            destination=command.destination,
            prefix_source=prefix_source,
            deadline_ms=self.remaining_ms(now_s),
        )

    def generate_message(
        self, command: StartGenerate, source: PeerAddress | None, now_s: float
    ) -> Generate:
        """The message of a generation leg."""
        request = self.request
        return Generate(
            request_id=command.leg_id,
            tokens=self.packed_tokens,
            scope=request.scope,
            sampling=request.sampling,
            stop=request.stop,
            n=request.n,
            source=source,
            emitted=tuple(map(pack_ints, command.emitted)),
            finished=command.finished,
            deadline_ms=self.remaining_ms(now_s),
        )
