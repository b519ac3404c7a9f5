"""Prefixes that context legs fetch from other instances' caches before they compute.

Life of a pull: 1 ask the source; 2 it says how far it goes: queue for pages; 3 match the own prefix
tree, allocate the rest, say where it goes; 4 when every page is in, commit the prefix to the tree
and let go of it, so that the leg's sequence finds it there like anything computed here. However a
pull ends, its leg computes what the tree then lacks: a pull saves work or does nothing.
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
        """Ask the instance that is believed to hold the prefix. False, and nothing done, where
        there is none or too little would be saved.
        """
        desk, source = self._desk, leg.prefix_source
        if source is None:
            return False
        block = desk.demand.tokens_per_block
        # The logits of the last token are needed: it is always computed here.
        wanted = (leg.prompt_tokens - 1) // block
        least = self._held_blocks(leg, wanted * block) + desk.demand.blocks(
            max(1, self._limits.least_tokens)
        )
        pull_id = f"{leg.request_id}/pull"
        if min(wanted, source.tokens // block) < least or desk.leases.has_session(pull_id):
            return False
        left_ms = max(1, leg.deadline_at_ms - desk.clock.now_ms())
        leg.pull_id = pull_id
        leg.enter(LegState.PULLING)
        self._pulls[pull_id] = _Pull(leg, wanted, least)
        desk.leases.open_session(pull_id)
        prefix = Prefix(leg.scope, leg.prompt[: wanted * block])
        deadline_ms = min(left_ms, self._limits.timeout_ms)
        desk.transfers.pull(pull_id, source.peer, prefix, least, deadline_ms)
        return True

    def _held_blocks(self, leg: LegRecord, max_match: int) -> int:
        cache = open_whole_blocks(self._desk.manager, leg.scope, leg.prompt, max_match=max_match)
        cache.close()
        return self._desk.demand.blocks(cache.matched_tokens)

    def found(self, event: PrefixFoundReceived) -> None:
        """The source has the prefix up to some block: pages are needed now."""
        pull = self._pulls[event.request_id]
        if pull.leg.ended:
            return  # its session is being cancelled
        if not pull.least_blocks <= event.end_block <= pull.wanted_blocks:
            reason = (
                f"found: expected {pull.least_blocks} to {pull.wanted_blocks} blocks, "
                f"got {event.end_block}"
            )
            self._desk.transfers.cancel(event.request_id, reason)
            return
        pull.end_block = event.end_block
        pull.leg.enter(LegState.PULL_LANDING)

    def land(self, leg: LegRecord) -> bool:
        """Allocate what the own prefix tree lacks. False, and nothing changed, while pages are
        short.
        """
        desk = self._desk
        pull_id = leg.pull_id
        assert pull_id is not None
        pull = self._pulls[pull_id]
        end_tokens = pull.end_block * desk.demand.tokens_per_block
        cache = open_whole_blocks(desk.manager, leg.scope, leg.prompt, max_match=end_tokens)
        pull.first_block = desk.demand.blocks(cache.matched_tokens)
        if pull.first_block == pull.end_block:
            cache.close()  # computed here meanwhile, for another request
            desk.transfers.cancel(pull_id, "the prefix is here by now")
            self._over(pull_id)
            return True
        if not cache.grow_to_receive(end_tokens):
            cache.close()
            leg.saving = ()  # what it was to share is gone: it needs all of its room
            return False
        leg.landing = cache
        leg.enter(LegState.PULL_RECEIVING)
        lease = cache.lease(pull.first_block, pull.end_block)
        desk.leases.add(lease, pull.end_block - pull.first_block)
        desk.transfers.ready(pull_id, pull.first_block, pull.end_block, lease)
        return True

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
        leg.saving = ()
        self._compute(leg)
