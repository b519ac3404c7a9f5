"""The engine's state that both roles work on, and the few verbs that change it.

``end`` is the only way a leg ends and ``finish`` the only way a sequence does; each happens once.
Pages of a leg that is over go back at once, except those under a lease, which the lease book
returns when their last access has ended.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker.counters import Counters
from worker.demand import PageDemand
from worker.leases import LeaseBook
from worker.legs import LegTable
from worker.messages import LegEnded, LegStarted
from worker.outbox import Outbox
from worker.ports import (
    CacheManager,
    CacheSequence,
    Clock,
    Draw,
    StateSnapshot,
    Transfers,
)
from worker.requests import LegRecord, LegState, Sequence, SequenceState, TokenList
from worker.token_runs import FinishReason, TokenLogprob, TokenRun

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a leg ends."""

    outcome: Literal["succeeded", "failed", "cancelled", "rejected"]
    code: str = ""
    message: str = ""
    retryable: bool = False


SUCCEEDED = Ending("succeeded")
CANCELLED = Ending("cancelled", "cancelled", "the front end cancelled the request")


@dataclass(eq=False, slots=True)
class Desk:
    """Living legs and sequences with everything that acts on them."""

    manager: CacheManager
    transfers: Transfers
    clock: Clock
    demand: PageDemand
    leases: LeaseBook
    legs: LegTable = field(default_factory=LegTable)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    counters: Counters = field(default_factory=Counters)
    next_key: int = 0
    departing: dict[int, Sequence] = field(default_factory=dict)
    """Finished sequences whose pages steps under way still touch."""

    def add_sequence(
        self,
        leg: LegRecord,
        choices: tuple[int, ...],
        tokens: TokenList,
        state: SequenceState,
        cache: CacheSequence | None = None,
    ) -> Sequence:
        """A new sequence; it is RUNNING exactly when it comes with pages."""
        self.next_key += 1
        sequence = Sequence(self.next_key, leg, choices, tokens, state, cache)
        self.sequences[sequence.key] = sequence
        leg.sequences[sequence.key] = sequence
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Nothing more is wanted: verified tokens stay in the prefix tree, the pages go back once
        no step touches them any more.
        """
        computing = sequence.state is SequenceState.RUNNING
        sequence.enter(SequenceState.FINISHED)
        if sequence.under_way:
            self.departing[sequence.key] = sequence
        else:
            if computing:
                self.commit(sequence)
            self._close(sequence)
        del self.sequences[sequence.key]
        del sequence.leg.sequences[sequence.key]
        self.let_go(sequence)

    def touched(self, sequence: Sequence) -> None:
        """A step that computed for the sequence is over; ``under_way`` says what is left."""
        if sequence.rebased is not None:
            self.manager.release(sequence.rebased)
            sequence.rebased = None
        if not sequence.under_way and self.departing.pop(sequence.key, None) is not None:
            self.commit(sequence)
            self._close(sequence)

    @staticmethod
    def _close(sequence: Sequence) -> None:
        if sequence.cache is not None:
            sequence.cache.close()
            sequence.cache = None

    def let_go(self, sequence: Sequence) -> None:
        """What was held back by this sequence may start."""
        for held in sequence.holds_back:
            if held.state is SequenceState.HELD:
                held.enter(SequenceState.QUEUED)
        sequence.holds_back.clear()

    def commit(self, sequence: Sequence) -> None:
        """Enter everything final into the prefix tree.

        Where the tree has a block already, the sequence goes on with the tree's pages; its own stay
        with it while a step reads them.
        """
        cache = sequence.cache
        if cache is None or cache.committed >= cache.history:
            return
        if sequence.under_way:
            block = self.demand.tokens_per_block
            first, end = cache.committed // block, cache.history // block
            if first < end:
                sequence.rebased = cache.lease(first, end)
        cache.commit(sequence.tokens.span(cache.committed, cache.history))

    def keep_states(self, sequence: Sequence, snapshot: StateSnapshot | None) -> None:
        """Commit with the state at each snapshot point that the last step reached; ``snapshot`` was
        kept in mid-chunk.
        """
        cache = sequence.cache
        if cache is None:
            return
        history = cache.history
        if snapshot is not None:
            cache.commit_with_snapshot(sequence.tokens.span(cache.committed, snapshot.length))
        if history in sequence.snapshot_points:
            cache.commit_with_live_snapshot(sequence.tokens.span(cache.committed, history))
        points = sequence.snapshot_points
        sequence.snapshot_points = tuple(point for point in points if point > history)

    def start(self, leg: LegRecord, cached_tokens: int, host_tokens: int) -> None:
        """Tell once what the cache held of the prompt, and count how much of it lay on the host."""
        if leg.started:
            return
        leg.started = True
        leg.cached_tokens = min(cached_tokens, leg.prompt_tokens)
        self.counters.cached_tokens += cached_tokens
        self.counters.host_cached_tokens += min(host_tokens, cached_tokens)
        self.outbox.started(
            leg.front_end,
            LegStarted(
                request_id=leg.request_id,
                leg=leg.kind,
                prompt_tokens=leg.prompt_tokens,
                cached_tokens=leg.cached_tokens,
            ),
        )

    def emit(
        self,
        leg: LegRecord,
        choice: int,
        index: int,
        token: int,
        logprob: TokenLogprob | None,
        finish: FinishReason | None,
    ) -> None:
        """One output token of one choice."""
        self.outbox.run(
            leg.front_end,
            TokenRun(
                request_id=leg.request_id,
                choice=choice,
                start=index,
                tokens=token.to_bytes(4, "little"),
                logprobs=() if logprob is None else (logprob,),
                finish=finish,
            ),
        )

    def emit_finish(self, leg: LegRecord, choice: int, index: int, finish: FinishReason) -> None:
        """A choice that already has its last token, at ``index - 1``."""
        self.outbox.run(
            leg.front_end,
            TokenRun(
                request_id=leg.request_id, choice=choice, start=index, tokens=b"", finish=finish
            ),
        )

    def withdraw(self, leg: LegRecord, reason: str) -> None:
        """End a leg well, though its transfer is not over, because nothing is wanted of it any
        more.
        """
        if leg.uses_transfer and self.leases.has_session(leg.request_id):
            self.transfers.cancel(leg.request_id, reason)
        self.end(leg, SUCCEEDED)

    def end(self, leg: LegRecord, ending: Ending) -> None:
        """End a leg: its one terminal event. What does not succeed takes its session along."""
        leg.enter(LegState.ENDED)
        for sequence in list(leg.sequences.values()):
            sequence.holds_back.clear()
            self.finish(sequence)
        if leg.landing is not None:
            leg.landing.close()
            leg.landing = None
        if ending.outcome != "succeeded":
            for session in filter(self.leases.has_session, leg.session_ids):
                self.transfers.cancel(session, ending.message)
        self.legs.remove(leg, self.clock.now_ms())
        if ending.outcome == "failed":
            logger.warning(
                "%s leg of %s failed: %s, %s",
                leg.kind,
                leg.request_id,
                ending.code,
                ending.message,
            )
        self.outbox.ended(
            leg.front_end,
            LegEnded(
                request_id=leg.request_id,
                leg=leg.kind,
                outcome=ending.outcome,
                code=ending.code,
                message=ending.message,
                retryable=ending.retryable,
                transferred_bytes=leg.transferred_bytes,
                prefill_tokens=leg.prefill_tokens,
            ),
        )

    def draws(self, sequence: Sequence) -> tuple[Draw, ...]:
        """What to draw from the logits of the sequence's last token, one draw a choice."""
        leg, known = sequence.leg, sequence.tokens.length
        prompt, sampling, stop = leg.prompt, leg.sampling, leg.stop
        prompt_tokens = len(prompt)
        index = known + sequence.draws_under_way - prompt_tokens
        banned = stop.stop_token_ids if index < stop.min_tokens else ()
        output: npt.NDArray[np.int32] = sequence.tokens.span(prompt_tokens, known)
        if len(sequence.choices) == 1:
            return (Draw(sampling, sequence.choices[0], index, prompt, output, banned),)
        return tuple(
            [Draw(sampling, choice, index, prompt, output, banned) for choice in sequence.choices]
        )
