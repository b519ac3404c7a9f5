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

from transfer.agent_events import AgentEvent
from transfer.identity import Incarnation
from worker.admission_planner import AdmissionPlanner
from worker.counters import Counters, Heartbeat
from worker.demand import PageDemand
from worker.desk import Ending
from worker.dp_group import DpGroup, GroupLimits, GroupParts, Shared, earliest, make_group
from worker.gauges import read_gauges
from worker.inbox import (
    FrontEndCommand,
    FrontEndJoined,
    FrontEndLost,
    Inbox,
    InboxItem,
    PairsChanged,
    RankReported,
    Shutdown,
)
from worker.interpreter import Interpreter, OnlyThread
from worker.messages import StepOutput, WorkerGauges
from worker.outbox import Outbox
from worker.placing import Placing
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
    step_rows,
)
from worker.prefixes import PullLimits
from worker.requests import Sequence, SequenceState
from worker.scheduler import Demotion
from worker.steps import Batch, StepsUnderWay

GAUGES_EVERY_MS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of requests, steps and faults; those of steps are each dp group's."""

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
    planner: AdmissionPlanner | None = None
    """Of several dp groups; None: requests are placed in order of arrival."""


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
    others: tuple[GroupParts, ...] = ()
    """The dp groups behind the leader's own, by rank."""
    interpreter: Interpreter = field(default_factory=OnlyThread)


class Engine:
    """Continuous batching over all legs of this worker. Used by one thread only, except
    ``heartbeat``.
    """

    def __init__(self, parts: EngineParts, limits: EngineLimits) -> None:
        self._parts = parts
        self._limits = limits
        self._outbox = Outbox()
        self._counters = Counters()
        shared = Shared(parts.clock, parts.demand, self._outbox, self._counters)
        of_each = GroupLimits(
            incarnation=parts.incarnation,
            max_sequence_tokens=limits.max_sequence_tokens,
            vocab_size=limits.vocab_size,
            max_batch_tokens=limits.max_batch_tokens,
            max_running=limits.max_running,
            pulls=limits.pulls,
            demotion=limits.demotion,
            state_alignment_tokens=limits.state_alignment_tokens,
        )
        own = GroupParts(parts.manager, parts.transfers, parts.agreement)
        self._groups = tuple(
            make_group(number, group, shared, of_each)
            for number, group in enumerate((own, *parts.others))
        )
        self._placing = Placing(self._groups, self._outbox, limits.planner)
        self._steps = StepsUnderWay([group.desk for group in self._groups], parts.executor)
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
        self._placing.place()
        for group in self._groups:
            group.intake.expire()
        self._watch_quarantine()
        if self._stopped is not None:
            self._fail_everything(self._stopped)
            while self._steps:
                self._take_results()
        progress = self._stopped is None and self._advance()
        for group in self._groups:
            group.desk.manager.flush()
        self._parts.output.deliver(self._outbox.take())
        self._tell_gauges(now=not progress)
        return progress

    def next_timer_ms(self) -> int | None:
        """When the engine has something to do even if no message comes."""
        timers = [group.intake.next_expiry_ms() for group in self._groups]
        if self._doubtful_since_ms is not None:
            timers.append(self._doubtful_since_ms + self._limits.quarantine_grace_ms)
        return earliest(timers)

    def _fail_everything(self, reason: str) -> None:
        """The worker ends: every leg does, so that its request can be repaired elsewhere."""
        self._placing.settle()
        for group in self._groups:
            for leg in list(group.desk.legs):
                group.desk.end(leg, Ending("failed", "worker_failed", reason, retryable=True))

    def _advance(self) -> bool:
        legs = self._legs()
        moved = sum([group.board.admit() for group in self._groups]) > 0
        batches = self._plan_step()
        batch = [pair for part in batches for pair in part]
        if batch:
            self._counters.steps += 1
            rows = step_rows([part for _, part in batch], len(self._groups))
            for group, own in zip(self._groups, batches, strict=True):
                own_slices = [part for _, part in own]
                group.desk.manager.run_step(self._counters.steps, own_slices, rows)
            self._parts.interpreter.share()
            self._steps.launch(self._counters.steps, batch)
        if self._steps and (not batch or len(self._steps) >= self._parts.executor.depth):
            self._take_results()
        elif not batch:
            # One that ended left pages to others.
            return moved or self._legs() < legs or self._placing.waiting > 0
        return True

    def _plan_step(self) -> list[Batch]:
        """Each group's part of the next step."""
        if not self._steps:
            return [group.step() for group in self._groups]
        if self._steps.can_go_ahead:
            return [group.step_ahead() for group in self._groups]
        return [() for _ in self._groups]

    def _take_results(self) -> None:
        for sequence, part, result in self._steps.take():
            self._computed(self._groups[part.dp_rank], sequence, part, result)

    def _legs(self) -> int:
        return sum([len(group.desk.legs) for group in self._groups])

    def _computed(
        self, group: DpGroup, sequence: Sequence, part: Slice, result: SliceResult
    ) -> None:
        leg = sequence.leg
        if sequence.state is SequenceState.FINISHED:
            return  # what nobody wants any more
        if isinstance(result, RowFailed):
            ending = Ending("failed", "bad_logits", result.reason, retryable=True)
            group.desk.end(leg, ending)
            return
        assert sequence.cache is not None
        tokens = len(part.tokens)
        if tokens == 1 and part.start >= leg.prompt_tokens:
            self._counters.decode_tokens += 1
        else:
            leg.prefill_tokens += tokens
            self._counters.prefill_tokens += tokens
        sequence.cache.advance(part.start + tokens)
        if sequence.snapshot_points:
            group.desk.keep_states(sequence, part.snapshot)
        self._commit(group, sequence)
        if len(part.draws) > len(sequence.choices):  # the front end has stopped some since
            pairs = zip(part.draws, result, strict=True)
            result = tuple(drawn for draw, drawn in pairs if draw.choice in sequence.choices)
        group.role(leg).computed(sequence, result)

    def _commit(self, group: DpGroup, sequence: Sequence) -> None:
        """Full blocks become reusable as soon as they are computed; the tail is committed when the
        sequence rests.
        """
        assert sequence.cache is not None
        block = self._parts.demand.tokens_per_block
        if sequence.cache.history // block > sequence.cache.committed // block:
            group.desk.commit(sequence)

    def _receive(self, item: InboxItem) -> None:
        match item:
            case FrontEndCommand():
                self._placing.command(item.connection, item.message)
            case FrontEndLost():
                self._placing.connection_lost(item.connection)
            case FrontEndJoined():
                self._gauges = None
            case PairsChanged():
                pass  # every turn tells the gauges that changed
            case Shutdown():
                self._stopped = self._stopped or item.reason
            case _:
                group = self._group_of(item)
                for event in group.agreement.heard(item):
                    group.intake.agent_event(event)

    def _group_of(self, item: AgentEvent | RankReported) -> DpGroup:
        """Whom it is about: ranks that share a group speak of the only one."""
        if len(self._groups) == 1 or not isinstance(item, RankReported):
            return self._groups[0]
        return self._groups[item.rank]

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
        blocks = sum([group.desk.leases.quarantined_blocks for group in self._groups])
        limit = self._limits.quarantine_limit_blocks
        return f"{blocks} blocks are in quarantine, the limit is {limit}" if blocks > limit else ""

    def _tell_gauges(self, *, now: bool) -> None:
        now_ms = self._parts.clock.now_ms()
        if not now and self._gauges is not None and now_ms - self._gauges_at_ms < GAUGES_EVERY_MS:
            return
        desks = [group.desk for group in self._groups]
        trouble = self._stopped or self._doubt()
        gauges = read_gauges(desks, self._placing.waiting, self._parts.interpreter, trouble)
        self._gauges_at_ms = now_ms
        if gauges != self._gauges:
            self._gauges = gauges
            self._parts.output.broadcast(StepOutput(gauges=gauges))
        for desk in desks:
            line = desk.manager.report(now_ms)
            if line is not None:
                logger.info(line)

    def _sleep_ms(self) -> int | None:
        timer = self.next_timer_ms()
        return None if timer is None else max(1, timer - self._parts.clock.now_ms())
