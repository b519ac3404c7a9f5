"""States, events and commands of a request: the vocabulary that :mod:`services.orchestration.flow`
connects.

Events are facts that the shell saw; commands are what it has to do, in order. Neither carries a
clock: deadlines arrive as :class:`DeadlinePassed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.orchestration.api import Failed, OutputEvent
from transfer.identity import Incarnation
from worker.messages import LegEnded, LegStarted
from worker.token_runs import TokenRun


class FlowState(Enum):
    """Where a request is on its path."""

    NEW = "new"
    """Placed and charged; nothing was sent."""
    PREFILLING = "prefilling"
    """The KV of the prompt is not yet complete where the request will be decoded. Token 1 may be
    out already.
    """
    DECODING = "decoding"
    """The generation worker has everything; the context leg does not matter any more."""
    SEEKING = "seeking"
    """A repair needs a worker and none was available."""
    FINISHING = "finishing"
    """Every choice finished; a figure of the usage is still on its way."""
    DRAINING = "draining"
    """The terminal event is out; legs are still ending on their workers."""
    DONE = "done"
    """No leg is left. Nothing follows."""


@dataclass(frozen=True)
class Begin:
    """Send the legs of the placement."""


@dataclass(frozen=True)
class LegReport:
    """What one step of one worker said about this request."""

    worker: Incarnation
    started: tuple[LegStarted, ...] = ()
    runs: tuple[TokenRun, ...] = ()
    ended: tuple[LegEnded, ...] = ()


@dataclass(frozen=True)
class WorkerLost:
    """The connection to a worker ended, and with it every leg there."""

    worker: Incarnation


@dataclass(frozen=True)
class WorkerFound:
    """Answer to :class:`FindWorker`: this worker is charged under the new leg's id."""

    worker: Incarnation


@dataclass(frozen=True)
class WorkerMissing:
    """Answer to :class:`FindWorker`: nobody is there."""


@dataclass(frozen=True)
class WorkerJoined:
    """A worker became available; who seeks may ask again."""


@dataclass(frozen=True)
class StopRequested:
    """The caller wants ``choice`` to end before output index ``index``."""

    choice: int
    index: int


CANCELLED: Final = Failed("cancelled", "the client closed the request", 499)


@dataclass(frozen=True)
class CancelRequested:
    """The caller is gone, or the service is."""

    failure: Failed = CANCELLED


@dataclass(frozen=True)
class DeadlinePassed:
    """The time of the request is over."""


FlowEvent = (
    Begin
    | LegReport
    | WorkerLost
    | WorkerFound
    | WorkerMissing
    | WorkerJoined
    | StopRequested
    | CancelRequested
    | DeadlinePassed
)


@dataclass(frozen=True)
class StartPrefill:
    """Send Prefill; without a destination one token is all that is wanted."""

    worker: Incarnation
    leg_id: str
    destination: Incarnation | None


@dataclass(frozen=True)
class StartGenerate:
    """Send Generate; ``source`` is the context worker, or None to prefill there."""

    worker: Incarnation
    leg_id: str
    source: Incarnation | None
    emitted: tuple[tuple[int, ...], ...] = ()
    """Output tokens that are out already, one tuple a choice; empty for a fresh request."""
    finished: tuple[int, ...] = ()


@dataclass(frozen=True)
class CancelLegs:
    """Send Cancel: every leg under ``leg_id`` on this worker ends."""

    worker: Incarnation
    leg_id: str


@dataclass(frozen=True)
class StopChoice:
    """Send Stop."""

    worker: Incarnation
    leg_id: str
    choice: int
    index: int


@dataclass(frozen=True)
class Emit:
    """Hand an event to the caller. Terminal events come exactly once and last."""

    event: OutputEvent


@dataclass(frozen=True)
class ReleasePrefill:
    """The prompt's work no longer waits on the worker that was charged for it under ``leg_id``."""

    leg_id: str


@dataclass(frozen=True)
class ReleaseSequence:
    """The sequence charged under ``leg_id`` is over."""

    leg_id: str


@dataclass(frozen=True)
class FindWorker:
    """Choose and charge a worker for a repair; answered at once with WorkerFound or
    WorkerMissing.
    """

    leg_id: str
    preferred: Incarnation | None
    avoid: frozenset[Incarnation]


@dataclass(frozen=True)
class ConfirmPlacement:
    """The first token of the prompt is out: the worker that was placed last has done its part."""


@dataclass(frozen=True)
class RecordRepair:
    """A leg was replaced; ``cause`` is a metric's label."""

    cause: str


@dataclass(frozen=True)
class RecordConflict:
    """Two workers disagree about a token that is out already: one of them is wrong."""

    choice: int
    index: int


@dataclass(frozen=True)
class Forget:
    """The flow is DONE: drop it and its leg ids."""


FlowCommand = (
    StartPrefill
    | StartGenerate
    | CancelLegs
    | StopChoice
    | Emit
    | ReleasePrefill
    | ReleaseSequence
    | FindWorker
    | ConfirmPlacement
    | RecordRepair
    | RecordConflict
    | Forget
)


class InvalidTransition(RuntimeError):
    """An event came in a state where it cannot: a bug in the shell or in the flow."""

    def __init__(self, state: FlowState, event: FlowEvent, story: tuple[str, ...]) -> None:
        what = type(event).__name__
        super().__init__(f"{what} cannot happen in state {state.value}; story: {', '.join(story)}")
