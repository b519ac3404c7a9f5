"""Counters of the engine and its heartbeat. Totals only grow within an incarnation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start of this incarnation."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    """Of the cached tokens, those in blocks of which a page lay in host memory."""
    transferred_bytes: int = 0
    transferred_blocks: int = 0
    preemptions: int = 0
    pulls_succeeded: int = 0
    pulls_declined: int = 0
    pulls_failed: int = 0
    pulls_served: int = 0
    """Of other instances, from this one."""
    pulled_tokens: int = 0
    """Fetched from other instances instead of computed. They count as cached, too."""
    steps: int = 0


class Heartbeat:
    """Since when the engine is busy with one turn of its loop. Written by the engine thread, read
    by any.
    """

    def __init__(self) -> None:
        self._busy_since_ms: int | None = None

    def busy(self, now_ms: int) -> None:
        """A turn begins."""
        self._busy_since_ms = now_ms

    def idle(self) -> None:
        """The engine sleeps on its inbox: any message wakes it, so its age is nought."""
        self._busy_since_ms = None

    def age_ms(self, now_ms: int) -> int:
        """How long the current turn has taken; 0 while idle. A wedged or dead engine thread only
        grows older.
        """
        since = self._busy_since_ms
        return 0 if since is None else max(0, now_ms - since)
