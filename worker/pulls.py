"""Prefixes that context legs fetch from other instances' caches before they compute.

Life of a pull: 1 queue for room, like any prompt; 2 ask the source; 3 it says how far it goes:
match the own prefix tree, allocate the rest, say where it goes; 4 when every page is in, commit the
prefix to the tree and let go of it, so that the leg's sequence finds it there like anything
computed here. However a pull ends, its leg computes what the tree then lacks: it saves work or does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer.agent_events import HandoffReceived, PrefixFoundReceived, SessionEnded
from transfer.outcome import Outcome
from transfer.prefix import Prefix
from worker.desk import Desk
from worker.prefixes import PullLimits, open_whole_blocks
from worker.requests import LegRecord, LegState


@dataclass(eq=False, slots=True)
class _Pull:
    leg: LegRecord
    wanted_blocks: int
    least_blocks: int
    end_block: int = 0
    """What the source has, once it has said so."""
    first_block: int = 0
    """What the own tree had when pages were allocated."""


class PrefixPulls:
    """Pulls of this worker that are under way."""

    def __init__(
        self, desk: Desk, limits: PullLimits, compute: Callable[[LegRecord], None]
    ) -> None:
        """``compute`` is called once for each leg whose pull began, unless the leg ended first."""
        self._desk = desk
        self._limits = limits
        self._compute = compute
        self._pulls: dict[str, _Pull] = {}

    def __contains__(self, pull_id: str) -> bool:
        return pull_id in self._pulls

    def begin(self, leg: LegRecord) -> bool:
        """Queue for room, where a source is named that may have enough. False, and nothing done,
        where not.
        """
        source = leg.prefix_source
        if source is None:
            return False
        block = self._desk.demand.tokens_per_block
        offered = min(self._wanted_blocks(leg), source.tokens // block)
        pull_id = f"{leg.request_id}/pull"
        if offered < self._least_blocks or self._desk.leases.has_session(pull_id):
            return False
        leg.pull_id = pull_id
        leg.enter(LegState.PULL_WAITING)
        return True

    def ask(self, leg: LegRecord) -> None:
        """There is room: ask for the prefix, unless the own tree has nearly all of it by now."""
        desk, source, pull_id = self._desk, leg.prefix_source, leg.pull_id
        assert source is not None
        assert pull_id is not None
        leg.saving = ()
        block = desk.demand.tokens_per_block
        wanted = self._wanted_blocks(leg)
        held = open_whole_blocks(desk.manager, leg.scope, leg.prompt, max_match=wanted * block)
        held.close()
        least = desk.demand.blocks(held.matched_tokens) + self._least_blocks
        if min(wanted, source.tokens // block) < least:
            self._compute(leg)
            return
        leg.enter(LegState.PULLING)
        self._pulls[pull_id] = _Pull(leg, wanted, least)
        desk.leases.open_session(pull_id)
        prefix = Prefix(leg.scope, leg.prompt[: wanted * block])
        left_ms = max(1, leg.deadline_at_ms - desk.clock.now_ms())
        deadline_ms = min(left_ms, self._limits.timeout_ms)
        desk.transfers.pull(pull_id, source.peer.ranks, prefix, least, deadline_ms)

    @property
    def _least_blocks(self) -> int:
        return self._desk.demand.blocks(max(1, self._limits.least_tokens))

    def _wanted_blocks(self, leg: LegRecord) -> int:
        """The logits of the last token are needed: it is always computed here."""
        return (leg.prompt_tokens - 1) // self._desk.demand.tokens_per_block

    def found(self, event: PrefixFoundReceived) -> None:
        """The source has the prefix up to some block: say where what the own tree lacks goes."""
        desk, pull_id, pull = self._desk, event.request_id, self._pulls[event.request_id]
        leg = pull.leg
        if leg.ended:
            return  # its session is being cancelled
        if not pull.least_blocks <= event.end_block <= pull.wanted_blocks:
            desk.counters.pulls_failed += 1
            wanted = f"{pull.least_blocks} to {pull.wanted_blocks}"
            self._give_up(pull_id, f"found: expected {wanted} blocks, got {event.end_block}")
            return
        pull.end_block = event.end_block
        end_tokens = pull.end_block * desk.demand.tokens_per_block
        cache = open_whole_blocks(desk.manager, leg.scope, leg.prompt, max_match=end_tokens)
        pull.first_block = desk.demand.blocks(cache.matched_tokens)
        if pull.first_block == pull.end_block:
            cache.close()
            self._give_up(pull_id, "the prefix is here by now")
            return
        if not cache.grow_to_receive(end_tokens):
            cache.close()
            desk.counters.pulls_failed += 1
            self._give_up(pull_id, "the room for the prefix went to others")
            return
        leg.landing = cache
        leg.enter(LegState.PULL_RECEIVING)
        lease = cache.lease(pull.first_block, pull.end_block)
        desk.leases.add(lease, pull.end_block - pull.first_block)
        desk.transfers.ready(pull_id, pull.first_block, pull.end_block, lease)

    def _give_up(self, pull_id: str, reason: str) -> None:
        self._desk.transfers.cancel(pull_id, reason)
        self._over(pull_id)

    def received(self, event: HandoffReceived) -> None:
        """Every page is in: they are as good as computed here."""
        pull = self._pulls[event.request_id]
        leg = pull.leg
        if leg.landing is not None:
            block = self._desk.demand.tokens_per_block
            leg.landing.advance(pull.end_block * block)
            leg.landing.commit(leg.prompt[leg.landing.committed : leg.landing.history])
            self._desk.counters.pulls_succeeded += 1
            self._desk.counters.pulled_tokens += (pull.end_block - pull.first_block) * block
        self._over(event.request_id)

    def ended(self, event: SessionEnded) -> None:
        """The outcome of a pull's session; a pull that did not receive all is over with it."""
        counters = self._desk.counters
        if event.outcome is Outcome.SUCCEEDED:
            counters.pulls_declined += 1
        elif not self._pulls[event.request_id].leg.ended:
            counters.pulls_failed += 1
        self._over(event.request_id)

    def _over(self, pull_id: str) -> None:
        """Let go of the pages, which the tree now holds or nobody wants, and compute."""
        leg = self._pulls.pop(pull_id).leg
        if leg.ended:
            return
        if leg.landing is not None:
            leg.landing.close()
            leg.landing = None
        self._compute(leg)
