"""Prefixes of this worker's cache that other instances fetch.

Any worker serves pulls, whatever its role: of a prompt's prefix, and of what was generated after
it. What is found is leased in the same turn, so it cannot be evicted under the transfer; the agent
does the rest. A pull is a favour: it is declined rather than queued.
"""

from __future__ import annotations

from transfer.agent_events import PullReceived, SessionEnded
from transfer.messages import HandoffData
from transfer.outcome import Outcome
from worker.desk import Desk
from worker.prefixes import PullLimits, open_whole_blocks


class ServedPulls:
    """Pulls that this worker serves."""

    def __init__(self, desk: Desk, limits: PullLimits) -> None:
        self._desk = desk
        self._limits = limits
        self._served: set[str] = set()

    def __contains__(self, pull_id: str) -> bool:
        return pull_id in self._served

    def pull_received(self, event: PullReceived) -> None:
        """Serve the blocks that are here, or say that it is not worth it."""
        self._desk.leases.open_session(event.request_id)
        if len(self._served) >= self._limits.most_served:
            reason = f"{len(self._served)} pulls are being served"
            self._desk.transfers.decline(event.request_id, reason)
            return
        reason = self._serve(event)
        if reason:
            self._desk.transfers.decline(event.request_id, reason)

    def _serve(self, event: PullReceived) -> str:
        """Why not; empty when it is served."""
        desk = self._desk
        tokens = event.prefix.tokens
        cache = open_whole_blocks(desk.manager, event.prefix.scope, tokens, max_match=len(tokens))
        try:
            blocks = desk.demand.blocks(cache.matched_tokens)
            if blocks < event.least_blocks:
                return f"{blocks} blocks are here, at least {event.least_blocks} are wanted"
            # What lies on the host comes back to the device first.
            if not cache.is_resident and not cache.grow(cache.matched_tokens):
                return "no room to bring the prefix back from the host"
            lease = cache.lease(0, blocks)
        finally:
            cache.close()
        self._served.add(event.request_id)
        desk.leases.add(lease, blocks)
        desk.transfers.found(event.request_id, blocks)
        desk.transfers.ship(event.request_id, 0, blocks, lease)
        handoff = HandoffData(choices=(), cached_tokens=cache.matched_tokens)
        desk.transfers.hand_off(event.request_id, handoff)
        return ""

    def ended(self, event: SessionEnded) -> None:
        """The outcome of a served pull."""
        self._served.remove(event.request_id)
        if event.outcome is Outcome.SUCCEEDED:
            self._desk.counters.pulls_served += 1
