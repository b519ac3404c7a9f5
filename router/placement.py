"""Values that go into and come out of a placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from transfer.identity import Incarnation

ReservationKind = Literal["prefill", "sequence"]


class NoWorkerError(LookupError):
    """There is no live worker at all."""


class PlacementReason(StrEnum):
    """Which term decided where the prompt is prefilled; a metric's label."""

    ROUND_ROBIN = "round_robin"
    LEAST_BACKLOG = "least_backlog"
    ESTIMATED = "estimated"
    BOUND = "bound"
    """The conversation's own worker."""
    FOLLOWED = "followed"
    """A new conversation joined the worker that holds its prefix."""
    LOCAL = "local"
    """The generation worker holds nearly all of the prompt: no context leg."""
    NO_CONTEXT = "no_context"
    """There is no context worker: the generation worker prefills."""
    REPAIR = "repair"


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    """What the router knows of a request: counts and block keys, no tokens."""

    request_id: str
    prompt_tokens: int
    keys: tuple[bytes, ...] = ()
    """First 8 bytes of the key of every full block, scope included. A collision costs a wrong hint
    and no more.
    """
    max_output_tokens: int = 1
    """Of one choice."""
    n: int = 1
    conversation_id: str | None = None
    excluded: frozenset[Incarnation] = field(default_factory=frozenset)
    """Workers that just failed this request; used only when nothing else lives."""


@dataclass(frozen=True)
class Reservation:
    """Load that a placement puts on one worker until it is released by ``(leg_id, kind)``."""

    leg_id: str
    kind: ReservationKind
    worker: Incarnation
    tokens: int


@dataclass(frozen=True)
class PrefixHolder:
    """A worker that is believed to hold the first ``tokens`` tokens of a prompt."""

    worker: Incarnation
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the legs of one request run.

    ``context`` is None when the generation worker prefills by itself; ``generation`` is None when
    one token is wanted and the context worker gives it. Never both None.
    """

    request: RouteRequest
    context: Incarnation | None
    generation: Incarnation | None
    context_cached_tokens: int = 0
    generation_cached_tokens: int = 0
    prefix_source: PrefixHolder | None = None
    """From whom the context worker may fetch a prefix that it lacks itself."""
    reason: PlacementReason
    prefill: Reservation
    sequence: Reservation | None
    """None when there is no generation leg."""
    new_conversation: bool = False

    @property
    def prefill_worker(self) -> Incarnation:
        """Where the prompt is computed."""
        return self.prefill.worker
