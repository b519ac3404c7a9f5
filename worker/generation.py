"""Generation legs: tokens are decoded here; the prompt's pages come from a context worker or are
computed here.

Life of a leg with a source: 1 wait for room; 2 grant it; 3 when the context worker announces its
first chunk, match the own prefix tree, allocate the rest and say where it goes; 4 when every page
and the handoff are in, commit the prompt, fork one sequence a choice and decode. Without a source
(aggregated, conditional disaggregation, repair) the prompt and whatever was emitted already are
prefilled here. Either way output is sent from the first index on.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transfer.agent_events import HandoffReceived, SessionEnded
from transfer.messages import ChoiceHandoff
from transfer.outcome import Outcome
from worker.desk import SUCCEEDED, Desk, Ending
from worker.ports import CacheSequence, Drawn
from worker.prefixes import open_whole_blocks
from worker.requests import LegRecord, LegState, Sequence, SequenceState, TokenList
from worker.role import Role
from worker.token_runs import TokenLogprob

Emitted = Values[npt.NDArray[np.int32]]


class GenerationRole(Role):
    """Strategy of ``Generate`` legs."""

    def __init__(self, desk: Desk, vocab_size: int) -> None:
        self._desk = desk
        self._vocab_size = vocab_size

    def accept(self, leg: LegRecord, emitted: Emitted) -> None:
        """A new leg: in state AWAITING_ROOM with a source, else COMPUTING."""
        if leg.source is None:
            self._start_here(leg, emitted)
        self._end_if_done(leg)

    def _start_here(self, leg: LegRecord, emitted: Emitted) -> None:
        choices = tuple(sorted(leg.open_choices))
        if not any(len(emitted[choice]) for choice in choices):
            if choices:
                tokens = TokenList(leg.prompt)
                self._desk.add_sequence(leg, choices, tokens, SequenceState.QUEUED)
            return
        leader: Sequence | None = None
        for choice in choices:
            if self._already_over(leg, choice, emitted):
                continue
            tokens = TokenList(leg.prompt, emitted[choice])
            if leader is None:
                leader = self._desk.add_sequence(leg, (choice,), tokens, SequenceState.QUEUED)
            else:
                # The prompt is computed once: the others find it in the prefix tree.
                held = self._desk.add_sequence(leg, (choice,), tokens, SequenceState.HELD)
                leader.holds_back.append(held)

    def _already_over(self, leg: LegRecord, choice: int, emitted: Emitted) -> bool:
        """A repair may come for a choice whose last token the client has but whose finish it
        missed.
        """
        tokens = emitted[choice]
        if len(tokens) == 0:
            return False
        stopped = len(tokens) > leg.stop.min_tokens and int(tokens[-1]) in leg.stop.stop_token_ids
        if not stopped and len(tokens) < leg.output_limit:
            return False
        self._desk.emit_finish(leg, choice, len(tokens), "stop" if stopped else "length")
        leg.open_choices.discard(choice)
        return True

    def grant(self, leg: LegRecord) -> None:
        """There is room: promise it to the context worker."""
        source = leg.source
        assert source is not None
        leg.enter(LegState.GRANTED)
        left_ms = max(1, leg.deadline_at_ms - self._desk.clock.now_ms())
        self._desk.leases.open_session(leg.request_id)
        self._desk.transfers.grant(leg.request_id, source.ranks, leg.prompt_tokens, left_ms)

    def announced(self, request_id: str) -> None:
        """The context worker is about to compute the first chunk: pages are needed now."""
        leg = self._desk.legs.get("generation", request_id)
        if leg is not None and leg.state is LegState.GRANTED:
            leg.enter(LegState.LANDING)

    @override
    def land(self, leg: LegRecord) -> bool:
        """Allocate what the own prefix tree lacks. False, and nothing changed, while pages are
        short.
        """
        desk = self._desk
        block = desk.demand.tokens_per_block
        cache = desk.manager.open(leg.scope, leg.prompt, max_match=leg.prompt_tokens)
        if cache.matched_tokens < leg.prompt_tokens and cache.matched_tokens % block:
            # The partly matched block arrives whole: a copy of its beginning would be of no use,
            # and on a device it could be late and hit what has arrived.
            limit = cache.matched_tokens
            cache.close()
            cache = open_whole_blocks(desk.manager, leg.scope, leg.prompt, max_match=limit)
        matched = cache.matched_tokens
        if not cache.grow_to_receive(leg.prompt_tokens):
            cache.close()
            leg.saving = ()  # what it was to share is gone: it needs all of its room
            return False
        end_block = desk.demand.blocks(leg.prompt_tokens)
        complete = matched == leg.prompt_tokens
        first_block = end_block if complete else matched // block
        leg.landing = cache
        leg.enter(LegState.RECEIVING)
        lease = cache.lease(first_block, end_block)
        desk.leases.add(lease, end_block - first_block)
        desk.start(leg, matched, cache.host_matched_tokens)
        desk.transfers.ready(leg.request_id, first_block, end_block, lease)
        return True

    def handed_off(self, event: HandoffReceived) -> None:
        """Every page and the first tokens are in: decode."""
        leg = self._desk.legs.get("generation", event.request_id)
        if leg is None or leg.state is not LegState.RECEIVING or leg.landing is None:
            return
        choices = () if event.data is None else event.data.choices
        if message := self._unfit(choices, leg.n):
            self._desk.end(leg, Ending("failed", "bad_handoff", message, retryable=True))
            return
        cache, leg.landing = leg.landing, None
        leg.enter(LegState.COMPUTING)
        cache.advance(leg.prompt_tokens)
        if cache.committed < leg.prompt_tokens:
            cache.commit(leg.prompt[cache.committed :])
        drawn: dict[int, Drawn] = {}
        for index, choice in enumerate(choices):
            if index not in leg.open_choices:
                continue
            token = Drawn(choice.token, _logprob(choice))
            if choice.finish is None:
                drawn[index] = token
            else:
                # Whether token 1 ends a choice is the context worker's decision alone.
                self._desk.emit(leg, index, 0, token.token, token.logprob, choice.finish)
                leg.open_choices.discard(index)
        self._spread(leg, cache, drawn)

    def _unfit(self, choices: Values[ChoiceHandoff], n: int) -> str:
        """Why these are no first tokens of a request for ``n`` choices; empty when they are."""
        if len(choices) != n:
            return f"handoff: expected {n} first tokens, got {len(choices)}"
        highest = max(choice.token for choice in choices)
        if highest >= self._vocab_size:
            return f"handoff: expected token ids of 0 to {self._vocab_size - 1}, got {highest}"
        return ""

    def _spread(self, leg: LegRecord, cache: CacheSequence, drawn: dict[int, Drawn]) -> None:
        """One running sequence with the landed pages for all choices that go on; then as after any
        draw.
        """
        if not drawn:
            cache.close()
            self._end_if_done(leg)
            return
        tokens = TokenList(leg.prompt)
        sequence = self._desk.add_sequence(leg, tuple(drawn), tokens, SequenceState.RUNNING, cache)
        self.computed(sequence, tuple(drawn.values()))

    def no_decode(self, request_id: str) -> None:
        """The first token ended every choice on the context worker."""
        leg = self._desk.legs.get("generation", request_id)
        if leg is not None and leg.uses_transfer:
            self._desk.end(leg, SUCCEEDED)

    @override
    def opened(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        host_tokens = sequence.cache.host_matched_tokens
        self._desk.start(sequence.leg, sequence.computed, host_tokens)

    @override
    def computed(self, sequence: Sequence, drawn: Values[Drawn]) -> None:
        leg = sequence.leg
        if sequence.holds_back and sequence.computed >= leg.prompt_tokens:
            self._desk.let_go(sequence)
        if not drawn:
            return
        index = sequence.output_count
        going_on: list[tuple[int, int]] = []
        for choice, draw in zip(sequence.choices, drawn, strict=True):
            finish = sequence.finish_of(draw.token)
            self._desk.emit(leg, choice, index, draw.token, draw.logprob, finish)
            if finish is None:
                going_on.append((choice, draw.token))
            else:
                leg.open_choices.discard(choice)
        if not going_on:
            self._desk.finish(sequence)
            self._end_if_done(leg)
            return
        self._branch(sequence, going_on[1:])
        sequence.choices = (going_on[0][0],)
        sequence.tokens.append(going_on[0][1])

    def _branch(self, sequence: Sequence, others: Values[tuple[int, int]]) -> None:
        """One more sequence for each other choice, sharing all full blocks.

        Where no page is left for the private copy of the partial block, the choice queues for pages
        like any prompt and finds the full blocks in the prefix tree.
        """
        for choice, token in others:
            assert sequence.cache is not None
            tokens = TokenList(sequence.tokens.span(0, len(sequence.tokens)), (token,))
            branch = sequence.cache.fork()
            state = SequenceState.QUEUED if branch is None else SequenceState.RUNNING
            self._desk.add_sequence(sequence.leg, (choice,), tokens, state, branch)

    def stop(self, leg: LegRecord, choice: int) -> None:
        """The front end wants no more of this choice."""
        leg.open_choices.discard(choice)
        for sequence in list(leg.sequences.values()):
            if choice not in sequence.choices:
                continue
            sequence.choices = tuple(other for other in sequence.choices if other != choice)
            if not sequence.choices:
                self._desk.finish(sequence)
        self._end_if_done(leg)

    def _end_if_done(self, leg: LegRecord) -> None:
        if leg.open_choices or leg.ended:
            return
        if leg.state is LegState.COMPUTING:
            self._desk.end(leg, SUCCEEDED)
        else:
            self._desk.withdraw(leg, "no choice wants tokens any more")

    @override
    def session_ended(self, leg: LegRecord, event: SessionEnded) -> None:
        if leg.state is LegState.COMPUTING:
            return
        reason = event.reason or f"the session ended as {event.outcome.value}"
        code = (
            "transfer_failed" if event.outcome is not Outcome.SUCCEEDED else "transfer_incomplete"
        )
        self._desk.end(leg, Ending("failed", code, reason, retryable=True))

    @override
    def expire(self, now_ms: int) -> None:
        """Generation legs remember nothing beyond themselves."""

    @override
    def next_expiry_ms(self) -> int | None:
        return None


def _logprob(choice: ChoiceHandoff) -> TokenLogprob | None:
    logprob = choice.logprob
    return None if logprob is None else TokenLogprob(logprob=logprob.logprob, top=logprob.top)
