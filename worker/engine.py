"""The one loop of a worker: drain the inbox, admit, launch a step, take the results of one, commit,
tell the front ends.

The engine thread owns every leg, sequence, page and the model. It has no role of its own: context
and generation legs run in the same steps. Where the executor lets two steps be under way, the
results taken are those of the step before the one just launched. With nothing to do it sleeps on
the inbox until a message or the next deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

from transfer.identity import Incarnation
from worker.admission import Bounds
from worker.chunks import ChunkRules
from worker.context import ContextRole
from worker.counters import Heartbeat
from worker.demand import PageDemand
from worker.desk import Desk, Ending
from worker.gauges import read_gauges
from worker.generation import GenerationRole
from worker.inbox import (
    FrontEndCommand,
    FrontEndJoined,
    FrontEndLost,
    Inbox,
    InboxItem,
    PairsChanged,
    Shutdown,
)
from worker.intake import Intake
from worker.interpreter import Interpreter, OnlyThread
from worker.leases import LeaseBook
from worker.messages import StepOutput, WorkerGauges
from worker.pages import PageBoard
from worker.ports import (
    Agreement,
    CacheManager,
    Clock,
    Executor,
    OnlyRank,
    Output,
    RowFailed,
    Slice,
    SliceResult,
    Transfers,
)
from worker.prefix_waits import PrefixWaits
from worker.prefixes import PullLimits
from worker.requests import Sequence, SequenceState
from worker.scheduler import Demotion
from worker.served_pulls import ServedPulls
from worker.steps import StepsUnderWay
from worker.survey import Survey

GAUGES_EVERY_MS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of requests, steps and faults."""

    max_sequence_tokens: int
    vocab_size: int
    max_batch_tokens: int
    max_running: int
    quarantine_limit_blocks: int
    quarantine_grace_ms: int
    pulls: PullLimits
    demotion: Demotion | None = None
    """None: a prompt keeps its place and the oldest its half of the prefill budget however long it
    is.
    """
    state_alignment_tokens: int | None = None
    """The model can keep recurrent states in mid-chunk at multiples of it; None: it cannot."""


@dataclass(frozen=True, eq=False, slots=True)
class EngineParts:
    """What an engine is made of."""

    incarnation: Incarnation
    manager: CacheManager
    transfers: Transfers
    executor: Executor
    output: Output
    clock: Clock
    demand: PageDemand
    agreement: Agreement = field(default_factory=OnlyRank)
    interpreter: Interpreter = field(default_factory=OnlyThread)


class Engine:
    """Continuous batching over all legs of this worker. Used by one thread only, except
    ``heartbeat``.
    """

    def __init__(self, parts: EngineParts, limits: EngineLimits) -> None:
        self._parts = parts
        self._limits = limits
        self._desk = Desk(
            manager=parts.manager,
            transfers=parts.transfers,
            clock=parts.clock,
            demand=parts.demand,
            leases=LeaseBook(parts.manager),
        )
        context = ContextRole(self._desk, limits.pulls)
        generation = GenerationRole(self._desk, limits.vocab_size)
        bounds = Bounds(limits.max_sequence_tokens, limits.vocab_size, limits.max_running)
        served = ServedPulls(self._desk, limits.pulls)
        self._intake = Intake(self._desk, context, generation, served, bounds)
        self._board = PageBoard(
            self._desk,
            context,
            generation,
            Survey(
                self._desk,
                PrefixWaits(self._desk, limits.max_batch_tokens),
                limits.demotion,
                parts.incarnation,
            ),
            limits.max_batch_tokens,
            limits.max_running,
            limits.demotion,
            ChunkRules(parts.demand.tokens_per_block, limits.state_alignment_tokens),
        )
        self._roles = {"context": context, "generation": generation}
        self._steps = StepsUnderWay(self._desk, parts.executor)
        self._stopped: str | None = None
        self._doubtful_since_ms: int | None = None
        self._gauges: WorkerGauges | None = None
        self._gauges_at_ms = 0
        self.heartbeat = Heartbeat()

    @property
    def stopped(self) -> str | None:
        """Why the engine is to end, once it is: told to stop, or too many pages in quarantine."""
        return self._stopped

    def run(self, inbox: Inbox) -> str:
        """Loop until the engine is to end; returns the reason. Whatever it raises makes the worker
        unusable.
        """
        progress = True
        while self._stopped is None:
            if progress:
                items = inbox.take()
            else:
                self.heartbeat.idle()
                items = inbox.wait(self._sleep_ms())
            self.heartbeat.busy(self._parts.clock.now_ms())
            progress = self.turn(items)
        return self._stopped

    def turn(self, items: Values[InboxItem]) -> bool:
        """One round. False when nothing can go on without a message or the passing of time."""
        for item in items:
            self._receive(item)
        self._intake.expire()
        self._watch_quarantine()
        if self._stopped is not None:
            self._fail_everything(self._stopped)
            while self._steps:
                self._take_results()
        progress = self._stopped is None and self._advance()
        self._parts.manager.flush()
        self._parts.output.deliver(self._desk.outbox.take())
        self._tell_gauges(now=not progress)
        return progress

    def next_timer_ms(self) -> int | None:
        """When the engine has something to do even if no message comes."""
        timers = [self._intake.next_expiry_ms()]
        if self._doubtful_since_ms is not None:
            timers.append(self._doubtful_since_ms + self._limits.quarantine_grace_ms)
        return min((timer for timer in timers if timer is not None), default=None)

    def _fail_everything(self, reason: str) -> None:
        """The worker ends: every leg does, so that its request can be repaired elsewhere."""
        for leg in list(self._desk.legs):
            self._desk.end(leg, Ending("failed", "worker_failed", reason, retryable=True))

    def _advance(self) -> bool:
        legs = len(self._desk.legs)
        moved = self._board.admit()
        batch = self._plan_step()
        if batch:
            self._desk.counters.steps += 1
            self._parts.manager.run_step(self._desk.counters.steps, [part for _, part in batch])
            self._parts.interpreter.share()
            self._steps.launch(batch)
        if self._steps and (not batch or len(self._steps) >= self._parts.executor.depth):
            self._take_results()
        elif not batch:
            return moved or len(self._desk.legs) < legs  # one that ended left pages to others
        return True

    def _plan_step(self) -> list[tuple[Sequence, Slice]]:
        if not self._steps:
            return self._board.step()
        return self._board.step_ahead() if self._steps.can_go_ahead else []

    def _take_results(self) -> None:
        for sequence, part, result in self._steps.take():
            self._computed(sequence, part, result)

    def _computed(self, sequence: Sequence, part: Slice, result: SliceResult) -> None:
        leg = sequence.leg
        if sequence.state is SequenceState.FINISHED:
            return  # what nobody wants any more
        if isinstance(result, RowFailed):
            ending = Ending("failed", "bad_logits", result.reason, retryable=True)
            self._desk.end(leg, ending)
            return
        assert sequence.cache is not None
        tokens = len(part.tokens)
        if tokens == 1 and part.start >= leg.prompt_tokens:
            self._desk.counters.decode_tokens += 1
        else:
            leg.prefill_tokens += tokens
            self._desk.counters.prefill_tokens += tokens
        sequence.cache.advance(part.start + tokens)
        if sequence.snapshot_points:
            self._desk.keep_states(sequence, part.snapshot)
        self._commit(sequence)
        if len(part.draws) > len(sequence.choices):  # the front end has stopped some since
            pairs = zip(part.draws, result, strict=True)
            result = tuple(drawn for draw, drawn in pairs if draw.choice in sequence.choices)
        self._roles[leg.kind].computed(sequence, result)

    def _commit(self, sequence: Sequence) -> None:
        """Full blocks become reusable as soon as they are computed; the tail is committed when the
        sequence rests.
        """
        assert sequence.cache is not None
        block = self._parts.demand.tokens_per_block
        if sequence.cache.history // block > sequence.cache.committed // block:
            self._desk.commit(sequence)

    def _receive(self, item: InboxItem) -> None:
        match item:
            case FrontEndCommand():
                self._intake.command(item.connection, item.message)
            case FrontEndLost():
                self._intake.connection_lost(item.connection)
            case FrontEndJoined():
                self._gauges = None
            case PairsChanged():
                pass  # every turn tells the gauges that changed
            case Shutdown():
                self._stopped = self._stopped or item.reason
            case _:
                for event in self._parts.agreement.heard(item):
                    self._intake.agent_event(event)

    def _watch_quarantine(self) -> None:
        """Above the limit the worker is not ready; when that lasts, it ends."""
        if not self._doubt():
            self._doubtful_since_ms = None
            return
        now_ms = self._parts.clock.now_ms()
        if self._doubtful_since_ms is None:
            self._doubtful_since_ms = now_ms
        if now_ms - self._doubtful_since_ms >= self._limits.quarantine_grace_ms:
            self._stopped = self._stopped or self._doubt()

    def _doubt(self) -> str:
        """What is wrong with the quarantine; empty while it is within its limit."""
        blocks, limit = self._desk.leases.quarantined_blocks, self._limits.quarantine_limit_blocks
        return f"{blocks} blocks are in quarantine, the limit is {limit}" if blocks > limit else ""

    def _tell_gauges(self, *, now: bool) -> None:
        now_ms = self._parts.clock.now_ms()
        if not now and self._gauges is not None and now_ms - self._gauges_at_ms < GAUGES_EVERY_MS:
            return
        gauges = read_gauges(self._desk, self._parts.interpreter, self._stopped or self._doubt())
        self._gauges_at_ms = now_ms
        if gauges != self._gauges:
            self._gauges = gauges
            self._parts.output.broadcast(StepOutput(gauges=gauges))
        line = self._parts.manager.report(now_ms)
        if line is not None:
            logger.info(line)

    def _sleep_ms(self) -> int | None:
        timer = self.next_timer_ms()
        return None if timer is None else max(1, timer - self._parts.clock.now_ms())
