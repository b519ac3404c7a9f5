"""Context legs: prompts that are prefilled here and decoded elsewhere.

Life of a leg: 1 wait for the grant of the generation worker (it may have come before the request:
remembered, bounded, expiring), then for a prefix that another instance has (:mod:`worker.pulls`);
2 queue for pages; 3 announce, then compute chunk by chunk, shipping
the blocks of each finished chunk while the next one computes; 4 draw the first token of every
choice from one row of logits and stream it at once; 5 hand off, or say that there is nothing to
decode; 6 end with the session. Shipped pages are leased until their last access ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from typing_extensions import override

from transfer.agent_events import GrantReceived, SessionEnded
from transfer.identity import Incarnation
from transfer.messages import ChoiceHandoff, HandoffData, HandoffLogprob
from transfer.outcome import Outcome
from worker.desk import SUCCEEDED, Desk, Ending
from worker.ports import Drawn
from worker.prefixes import PullLimits
from worker.pulls import PrefixPulls
from worker.remembered import Remembered
from worker.requests import LegRecord, LegState, Sequence, SequenceState, TokenList
from worker.role import Role

REMEMBERED_GRANTS = 4096
REMEMBERED_GRANT_MS = 30_000


class ContextRole(Role):
    """Strategy of ``Prefill`` legs."""

    def __init__(self, desk: Desk, pull_limits: PullLimits) -> None:
        self._desk = desk
        self.pulls = PrefixPulls(desk, pull_limits, self._compute)
        self._grants = Remembered[Incarnation](
            limit=REMEMBERED_GRANTS, lifetime_ms=REMEMBERED_GRANT_MS
        )

    def accept(self, leg: LegRecord) -> None:
        """A new leg, in state AWAITING_GRANT."""
        grant = self._grants.take(leg.request_id)
        if leg.destination is None:
            if grant is not None:
                self._desk.transfers.cancel(leg.request_id, "the request needs no transfer")
            self._prepare(leg)
        elif grant is not None:
            self._granted(leg, grant)

    def refused(self, request_id: str) -> None:
        """The request was refused or cancelled before it became a leg: a grant for it is of no
        use.
        """
        if self._grants.take(request_id) is not None:
            self._desk.transfers.cancel(request_id, "the request was refused")

    def remembers(self, request_id: str) -> bool:
        """Whether a grant for it came before the request."""
        return request_id in self._grants

    def grant_received(self, event: GrantReceived) -> None:
        """Room is promised; the leg may not be here yet."""
        desk = self._desk
        desk.leases.open_session(event.request_id)
        leg = desk.legs.get("context", event.request_id)
        if leg is not None and leg.state is LegState.AWAITING_GRANT:
            self._granted(leg, event.generation)
        elif (
            leg is not None
            or desk.legs.was_cancelled(event.request_id)
            or desk.legs.ended_lately(event.request_id)
        ):
            desk.transfers.cancel(event.request_id, "the request is over on the context worker")
        else:
            self._remember(event)

    def _remember(self, event: GrantReceived) -> None:
        now_ms = self._desk.clock.now_ms()
        for pushed_out in self._grants.put(event.request_id, event.generation, now_ms):
            self._desk.transfers.cancel(pushed_out, "too many grants without a request")

    def _granted(self, leg: LegRecord, generation: Incarnation) -> None:
        if generation == leg.destination:
            self._prepare(leg)
            return
        reason = f"granted by {generation}, but the destination is {leg.destination}"
        self._desk.transfers.cancel(leg.request_id, reason)

    def _prepare(self, leg: LegRecord) -> None:
        if not self.pulls.begin(leg):
            self._compute(leg)

    @override
    def land(self, leg: LegRecord) -> bool:
        self.pulls.ask(leg)
        return True

    def _compute(self, leg: LegRecord) -> None:
        leg.enter(LegState.COMPUTING)
        choices = tuple(sorted(leg.open_choices))
        self._desk.add_sequence(leg, choices, TokenList(leg.prompt), SequenceState.QUEUED)

    @override
    def opened(self, sequence: Sequence) -> None:
        leg = sequence.leg
        first = not leg.started
        assert sequence.cache is not None
        self._desk.start(leg, sequence.computed, sequence.cache.host_matched_tokens)
        if first and leg.destination is not None:
            self._desk.transfers.announce(leg.request_id)
        self._ship(sequence, sequence.computed // self._desk.demand.tokens_per_block)

    @override
    def computed(self, sequence: Sequence, drawn: Values[Drawn]) -> None:
        if not drawn:
            self._ship(sequence, sequence.computed // self._desk.demand.tokens_per_block)
            return
        leg = sequence.leg
        choices = tuple(self._first_token(sequence, *pair) for pair in enumerate(drawn))
        if leg.destination is None:
            self._desk.end(leg, SUCCEEDED)
        elif all(choice.finish is not None for choice in choices):
            self._desk.transfers.no_decode(leg.request_id)
            self._desk.end(leg, SUCCEEDED)
        else:
            self._ship(sequence, self._desk.demand.blocks(leg.prompt_tokens))
            data = HandoffData(choices=choices, cached_tokens=leg.cached_tokens)
            self._desk.transfers.hand_off(leg.request_id, data)
            leg.enter(LegState.HANDING_OFF)
            self._desk.finish(sequence)

    def _first_token(self, sequence: Sequence, choice: int, drawn: Drawn) -> ChoiceHandoff:
        finish = sequence.finish_of(drawn.token)
        logprob = drawn.logprob
        self._desk.emit(sequence.leg, choice, 0, drawn.token, logprob, finish)
        return ChoiceHandoff(
            token=drawn.token,
            logprob=None
            if logprob is None
            else HandoffLogprob(logprob=logprob.logprob, top=logprob.top),
            finish=finish,
        )

    def _ship(self, sequence: Sequence, end_block: int) -> None:
        """Give the transfer all blocks before ``end_block`` that it does not have yet."""
        leg = sequence.leg
        start_block = leg.shipped_blocks
        if leg.destination is None or sequence.cache is None or end_block <= start_block:
            return
        if not sequence.cache.is_resident:
            return  # the first step brings its prefix back from the host
        lease = sequence.cache.lease(start_block, end_block)
        self._desk.leases.add(lease, end_block - start_block)
        self._desk.transfers.ship(leg.request_id, start_block, end_block, lease)
        leg.shipped_blocks = end_block

    @override
    def session_ended(self, leg: LegRecord, event: SessionEnded) -> None:
        if event.outcome is Outcome.SUCCEEDED and leg.state is LegState.HANDING_OFF:
            self._desk.end(leg, SUCCEEDED)
            return
        reason = event.reason or f"the session ended as {event.outcome.value}"
        self._desk.end(leg, Ending("failed", "transfer_failed", reason, retryable=True))

    @override
    def expire(self, now_ms: int) -> None:
        for request_id in self._grants.expire(now_ms):
            self._desk.transfers.cancel(request_id, "no request came for the grant")

    @override
    def next_expiry_ms(self) -> int | None:
        return self._grants.next_expiry_ms()

    def forget_grant(self, request_id: str) -> None:
        """The session of this grant is over."""
        self._grants.take(request_id)
