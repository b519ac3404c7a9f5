"""The path of one request as a state machine: events in, commands out, no IO and no clock.

Invariants: tokens of a choice leave by index, each once; exactly one terminal event leaves, as the
last one; each reservation is released exactly once; once a request is repaired, nothing that an
earlier leg still says counts, because its tokens need not agree with those of its successor. What a
state does with an event is in :data:`TRANSITIONS`; a pair that is not in it raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from services.orchestration.api import ChoiceFinished, Completed, Failed, OutputEvent, TokenDelta
from services.orchestration.choices import ChoiceProgress
from services.orchestration.flow_legs import FlowLeg, FlowLegs, LegStatus
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
from transfer.identity import Incarnation
from worker.messages import LegEnded

MAX_REPAIRS: Final = 3
DETERMINISTIC: Final = frozenset({"bad_logits"})
"""Codes of failures that come again on any sound worker. One other worker is asked, in case it is
the worker that is not sound."""
STORY_LENGTH: Final = 32


@dataclass(frozen=True, kw_only=True)
class FlowPlan:
    """A placed request: what the flow starts from."""

    request_id: str
    prompt_tokens: int
    n: int
    context: Incarnation | None
    generation: Incarnation | None
    """None when the context worker gives the one token that is wanted."""


class RequestFlow:
    """One request from placement to the end of its last leg."""

    def __init__(self, plan: FlowPlan) -> None:
        self.state = FlowState.NEW
        self.repairs = 0
        self._plan = plan
        self._choices = tuple(ChoiceProgress(choice) for choice in range(plan.n))
        self._legs = FlowLegs()
        self._commands: list[FlowCommand] = []
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)
        self._cached_tokens: int | None = None
        self._transferred_bytes = 0
        self._prefill_held: str | None = plan.request_id
        self._sequence_held: str | None = None if plan.generation is None else plan.request_id
        self._confirmed = False
        self._stopped = False
        self._failing_workers: set[Incarnation] = set()
        self._deterministic: LegEnded | None = None
        self._seeking_leg = ""
        self._last_generation = plan.generation

    @property
    def ended(self) -> bool:
        """Whether the terminal event is out."""
        return self.state in (FlowState.DRAINING, FlowState.DONE)

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, for a bug report."""
        return tuple(self._story)

    def handle(self, event: FlowEvent) -> tuple[FlowCommand, ...]:
        """Take in one event. Raises InvalidTransition for one that cannot happen now."""
        handler = TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(self.state, event, self.story)
        if not isinstance(event, LegReport):
            self._story.append(type(event).__name__)
        handler(self, event)
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def abort(self, message: str) -> tuple[FlowCommand, ...]:
        """End in any state because of a bug: what the request holds is released, its legs are
        cancelled.
        """
        if not self.ended:
            self._fail(Failed("internal_error", message, 500))
        if self.state is not FlowState.DONE:
            self._enter(FlowState.DONE)
            self._do(Forget())
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def _begin(self, _: Begin) -> None:
        plan = self._plan
        if plan.context is not None:
            self._legs.context = FlowLeg(plan.request_id, "context", plan.context)
            self._do(StartPrefill(plan.context, plan.request_id, plan.generation))
        if plan.generation is not None:
            self._legs.generation = FlowLeg(
                plan.request_id,
                "generation",
                plan.generation,
                receives_pages=plan.context is not None,
            )
            self._do(StartGenerate(plan.generation, plan.request_id, plan.context))
        self._enter(FlowState.PREFILLING)

    def _report(self, event: LegReport) -> None:
        self._take_in(event)
        for run in event.runs:
            leg = self._legs.source_of(run.request_id, event.worker)
            if leg is None or not 0 <= run.choice < len(self._choices):
                continue
            leg.emitted = True
            choice = self._choices[run.choice]
            was_finished = choice.finish is not None
            effect = choice.accept(run)
            if effect.conflict_index is not None:
                self._do(RecordConflict(run.choice, effect.conflict_index))
            if effect.delta is not None:
                self._first_token()
                self._do(Emit(effect.delta))
                if leg.kind == "generation" and _proves_pages(leg, effect.delta):
                    self._enter(FlowState.DECODING)
            if choice.finish is not None and not was_finished:
                self._do(Emit(ChoiceFinished(run.choice, choice.finish)))
        self._take_stock()

    def _finishing_report(self, event: LegReport) -> None:
        self._take_in(event)
        self._complete_if_known()

    def _seeking_report(self, event: LegReport) -> None:
        self._take_in(event)

    def _draining_report(self, event: LegReport) -> None:
        broken = self._take_in(event)
        self._drain(sibling_broken=broken)

    def _worker_lost(self, event: WorkerLost) -> None:
        self._lose(event.worker)
        self._take_stock()

    def _seeking_worker_lost(self, event: WorkerLost) -> None:
        self._lose(event.worker)

    def _finishing_worker_lost(self, event: WorkerLost) -> None:
        self._lose(event.worker)
        self._complete_if_known()

    def _draining_worker_lost(self, event: WorkerLost) -> None:
        self._drain(sibling_broken=self._lose(event.worker))

    def _worker_found(self, event: WorkerFound) -> None:
        leg_id = self._seeking_leg
        self._prefill_held = self._sequence_held = leg_id
        if self._deterministic is not None and event.worker in self._failing_workers:
            self._fail_as(self._deterministic)  # there is no other worker to ask
            return
        self._last_generation = event.worker
        self._legs.generation = FlowLeg(leg_id, "generation", event.worker)
        emitted = tuple(tuple(choice.tokens) for choice in self._choices)
        finished = tuple(c.choice for c in self._choices if c.finish is not None)
        self._do(StartGenerate(event.worker, leg_id, None, emitted, finished))
        self._enter(FlowState.PREFILLING)

    def _seek(self, _: WorkerJoined) -> None:
        preferred = self._last_generation
        if preferred in self._failing_workers:
            preferred = None
        avoid = frozenset(self._failing_workers)
        self._do(FindWorker(self._seeking_leg, preferred, avoid))

    def _stop(self, event: StopRequested) -> None:
        if not 0 <= event.choice < len(self._choices):
            return
        if not self._choices[event.choice].stop(event.index):
            return
        self._stopped = True
        self._do(Emit(ChoiceFinished(event.choice, "stop")))
        if self._all_finished():
            self._take_stock()
            return
        for leg in self._legs.current():
            if leg.running:
                self._do(StopChoice(leg.worker, leg.leg_id, event.choice, event.index))

    def _late_stop(self, event: StopRequested) -> None:
        if 0 <= event.choice < len(self._choices):
            self._choices[event.choice].stop(event.index)

    def _cancel(self, event: CancelRequested) -> None:
        self._fail(event.failure)

    def _deadline(self, _: DeadlinePassed) -> None:
        self._fail(Failed("deadline_exceeded", "the request did not finish in time", 504))

    def _seeking_deadline(self, _: DeadlinePassed) -> None:
        message = "a worker was lost and none could take over before the deadline"
        self._fail(Failed("no_worker", message, 503, retry_after_s=1))

    def _finishing_deadline(self, _: DeadlinePassed) -> None:
        self._complete()
        if self.state is not FlowState.DONE:
            self._draining_deadline(DeadlinePassed())

    def _draining_deadline(self, _: DeadlinePassed) -> None:
        self._cancel_running()
        self._enter(FlowState.DONE)
        self._do(Forget())

    def _ignore(self, _: FlowEvent) -> None:
        pass

    def _take_in(self, event: LegReport) -> bool:
        """Note starts and ends. Returns whether a leg broke."""
        broken = False
        for started in event.started:
            leg = self._legs.find(started.request_id, started.leg, event.worker)
            if leg is not None and not leg.receives_pages and self._cached_tokens is None:
                self._cached_tokens = min(started.cached_tokens, self._plan.prompt_tokens)
        for ended in event.ended:
            leg = self._legs.find(ended.request_id, ended.leg, event.worker)
            if leg is None or not leg.running:
                continue
            leg.end(ended)
            broken = broken or leg.status is LegStatus.BROKEN
            if leg.kind == "generation":
                self._transferred_bytes += ended.transferred_bytes
        return broken

    def _lose(self, worker: Incarnation) -> bool:
        lost = [leg for leg in self._legs.running() if leg.worker == worker]
        for leg in lost:
            leg.status = LegStatus.BROKEN
        return bool(lost)

    def _first_token(self) -> None:
        self._release_prefill()
        if not self._confirmed:
            self._confirmed = True
            self._do(ConfirmPlacement())

    def _take_stock(self) -> None:
        """After news of the legs: finish, go on, repair or fail."""
        if self._all_finished():
            if self._stopped:
                self._cancel_running()
            self._enter(FlowState.FINISHING)
            self._complete_if_known()
            return
        for leg in self._legs.current():
            if leg.ended is not None and leg.ended.outcome == "rejected":
                self._reject(leg.ended)
                return
        context = self._legs.context
        if context is not None and not context.running:
            self._release_prefill()
        broken = self._leg_to_replace()
        if broken is not None:
            self._replace(broken)
        elif self._handed_over():
            self._enter(FlowState.DECODING)

    def _handed_over(self) -> bool:
        context = self._legs.context
        return context is not None and context.status is LegStatus.SUCCEEDED

    def _leg_to_replace(self) -> FlowLeg | None:
        """The leg without which the choices that still run cannot finish, if it is over."""
        context, generation = self._legs.context, self._legs.generation
        if generation is None:
            return context if context is not None and not context.running else None
        undecided = self.state is FlowState.PREFILLING and context is not None
        if not generation.running:
            # One that succeeded without tokens was told that the context's are all there are.
            told_nothing = undecided and generation.status is LegStatus.SUCCEEDED
            return None if told_nothing and context is not None and context.running else generation
        if undecided and context is not None and context.status is LegStatus.BROKEN:
            return context
        return None

    def _replace(self, leg: FlowLeg) -> None:
        """``leg`` cannot do its part: repair the request, or end it when that makes no sense."""
        ended = leg.ended
        if ended is not None and ended.code == "deadline":
            self._deadline(DeadlinePassed())
            return
        if ended is not None and ended.outcome == "failed":
            is_certain = ended.code in DETERMINISTIC
            if not ended.retryable or (is_certain and self._deterministic is not None):
                self._fail_as(ended)
                return
            if is_certain:
                self._deterministic = ended
                self._failing_workers.add(leg.worker)
        if self.repairs >= MAX_REPAIRS:
            reason = "" if ended is None or not ended.message else f": {ended.message}"
            message = (
                f"{self.repairs} repairs did not help; the last failure: {_cause(leg)}{reason}"
            )
            self._fail(Failed("repair_failed", message, 503, retry_after_s=1))
            return
        if leg.kind == "generation" and not leg.receives_pages:
            self._failing_workers.add(leg.worker)
        self.repairs += 1
        self._do(RecordRepair(f"{leg.kind}_{_cause(leg)}"))
        for running in self._legs.give_up():
            self._do(CancelLegs(running.worker, running.leg_id))
        for choice in self._choices:
            choice.drop_ahead()
        self._release_all()
        self._seeking_leg = f"{self._plan.request_id}.{self.repairs}"
        self._enter(FlowState.SEEKING)
        self._seek(WorkerJoined())

    def _fail_as(self, ended: LegEnded) -> None:
        self._fail(Failed(ended.code or "internal_error", ended.message or "a worker failed", 500))

    def _reject(self, ended: LegEnded) -> None:
        code = ended.code or "invalid_request"
        self._fail(Failed(code, ended.message or "a worker rejected the request", 400))

    def _complete_if_known(self) -> None:
        """Complete unless a figure of the usage is still to come from a leg that runs."""
        context, generation = self._legs.context, self._legs.generation
        prefill = context if context is not None else generation
        if self._cached_tokens is None and prefill is not None and prefill.running:
            return
        if generation is not None and generation.running and generation.emitted:
            return
        self._complete()

    def _complete(self) -> None:
        self._finish(
            Completed(
                prompt_tokens=self._plan.prompt_tokens,
                cached_tokens=self._cached_tokens or 0,
                completion_tokens=tuple(choice.completion_tokens for choice in self._choices),
                transferred_bytes=self._transferred_bytes,
                repaired=self.repairs > 0,
            )
        )
        self._drain(sibling_broken=any(leg.status is LegStatus.BROKEN for leg in self._legs.all()))

    def _fail(self, failed: Failed) -> None:
        self._finish(failed)
        self._cancel_running()
        self._drain(sibling_broken=False)

    def _finish(self, event: OutputEvent) -> None:
        self._release_all()
        self._do(Emit(event))
        self._enter(FlowState.DRAINING)

    def _drain(self, *, sibling_broken: bool) -> None:
        if not self._legs.running():
            self._enter(FlowState.DONE)
            self._do(Forget())
        elif sibling_broken:
            self._cancel_running()

    def _cancel_running(self) -> None:
        for leg in self._legs.running():
            self._do(CancelLegs(leg.worker, leg.leg_id))

    def _all_finished(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def _release_prefill(self) -> None:
        if self._prefill_held is not None:
            self._do(ReleasePrefill(self._prefill_held))
            self._prefill_held = None

    def _release_all(self) -> None:
        self._release_prefill()
        if self._sequence_held is not None:
            self._do(ReleaseSequence(self._sequence_held))
            self._sequence_held = None

    def _enter(self, state: FlowState) -> None:
        if state is not self.state:
            self._story.append(f"-> {state.value}")
            self.state = state

    def _do(self, command: FlowCommand) -> None:
        self._commands.append(command)


def _proves_pages(leg: FlowLeg, delta: TokenDelta) -> bool:
    """Whether ``delta`` needed the KV of the whole prompt here: a handed-over first token does
    not.
    """
    return not leg.receives_pages or delta.index + len(delta.tokens) > 1


def _cause(leg: FlowLeg) -> str:
    """Why a leg did not do its part, as a metric's label."""
    if leg.ended is None:
        return "lost"
    return "incomplete" if leg.ended.outcome == "succeeded" else leg.ended.outcome


_Handler = Callable[[RequestFlow, Any], None]
_F = RequestFlow

TRANSITIONS: Final[dict[tuple[FlowState, type[FlowEvent]], _Handler]] = {
    (FlowState.NEW, Begin): _F._begin,
    (FlowState.PREFILLING, LegReport): _F._report,
    (FlowState.PREFILLING, WorkerLost): _F._worker_lost,
    (FlowState.PREFILLING, WorkerJoined): _F._ignore,
    (FlowState.PREFILLING, StopRequested): _F._stop,
    (FlowState.PREFILLING, CancelRequested): _F._cancel,
    (FlowState.PREFILLING, DeadlinePassed): _F._deadline,
    (FlowState.DECODING, LegReport): _F._report,
    (FlowState.DECODING, WorkerLost): _F._worker_lost,
    (FlowState.DECODING, WorkerJoined): _F._ignore,
    (FlowState.DECODING, StopRequested): _F._stop,
    (FlowState.DECODING, CancelRequested): _F._cancel,
    (FlowState.DECODING, DeadlinePassed): _F._deadline,
    (FlowState.SEEKING, LegReport): _F._seeking_report,
    (FlowState.SEEKING, WorkerLost): _F._seeking_worker_lost,
    (FlowState.SEEKING, WorkerFound): _F._worker_found,
    (FlowState.SEEKING, WorkerMissing): _F._ignore,
    (FlowState.SEEKING, WorkerJoined): _F._seek,
    (FlowState.SEEKING, StopRequested): _F._stop,
    (FlowState.SEEKING, CancelRequested): _F._cancel,
    (FlowState.SEEKING, DeadlinePassed): _F._seeking_deadline,
    (FlowState.FINISHING, LegReport): _F._finishing_report,
    (FlowState.FINISHING, WorkerLost): _F._finishing_worker_lost,
    (FlowState.FINISHING, WorkerJoined): _F._ignore,
    (FlowState.FINISHING, StopRequested): _F._late_stop,
    (FlowState.FINISHING, CancelRequested): _F._cancel,
    (FlowState.FINISHING, DeadlinePassed): _F._finishing_deadline,
    (FlowState.DRAINING, LegReport): _F._draining_report,
    (FlowState.DRAINING, WorkerLost): _F._draining_worker_lost,
    (FlowState.DRAINING, WorkerJoined): _F._ignore,
    (FlowState.DRAINING, StopRequested): _F._ignore,
    (FlowState.DRAINING, CancelRequested): _F._ignore,
    (FlowState.DRAINING, DeadlinePassed): _F._draining_deadline,
    (FlowState.DONE, LegReport): _F._ignore,
    (FlowState.DONE, WorkerLost): _F._ignore,
    (FlowState.DONE, WorkerJoined): _F._ignore,
    (FlowState.DONE, StopRequested): _F._ignore,
    (FlowState.DONE, CancelRequested): _F._ignore,
    (FlowState.DONE, DeadlinePassed): _F._ignore,
}
"""Every pair that can happen. Missing: what would be a bug of the shell, such as an answer nobody
asked for.
"""
