"""What a transfer agent counts. Written in the loop, read from any thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transfer.messages import CancelSession, SenderFailed
from transfer.session_events import (
    CancelRequested,
    DeadlinePassed,
    FailureReported,
    PeerDied,
    PeerLost,
    PostEnded,
)

FAILURE_KINDS: dict[type, str] = {
    PeerLost: "peer_lost",
    PeerDied: "peer_lost",
    DeadlinePassed: "deadline",
    SenderFailed: "sender_failed",
    CancelSession: "cancelled",
    CancelRequested: "cancelled",
    FailureReported: "engine",
    PostEnded: "transport",
}


def failure_kind(event: object) -> str:
    """Label of a request whose first session to end badly did so because of ``event``."""
    return FAILURE_KINDS.get(type(event), "protocol")


@dataclass
class TransferCounters:
    """Totals are monotone over the life of the agent."""

    bytes_total: int = 0
    """Page bytes that arrived here or left."""
    blocks_total: int = 0
    """Blocks of requests; a block that came in parts of several ranks is one."""
    late_dials_total: int = 0
    """Requests whose context rank was dialled only when they came."""
    sessions_total: int = 0
    sessions_in_flight: int = 0
    """Sessions whose outcome is open or whose pages may still be touched."""
    leases_in_doubt: int = 0
    staged_bytes_total: int = 0
    """Page bytes that a gather or a scatter copied here; not those that could be left where they
    lay.
    """
    staging_bytes_in_doubt: int = 0
    """Staging buffers that a lost peer may still reach."""
    failures: Counter[str] = field(default_factory=Counter)
    """Requests that did not succeed, by kind."""
    busy_s: float = 0.0
    """Time in which page requests were under way, over all pairs."""
    busy_bytes: int = 0
    """Page bytes moved in that time."""

    @property
    def gb_per_s(self) -> float:
        """Mean rate while pages moved; 0 before the first."""
        return self.busy_bytes / self.busy_s / 1e9 if self.busy_s > 0 else 0.0


class BusyClock:
    """Adds the time between the first open request and the last end to the counters."""

    def __init__(self, counters: TransferCounters) -> None:
        self._counters = counters
        self._open = 0
        self._since_s = 0.0

    @property
    def open(self) -> int:
        """Requests under way."""
        return self._open

    def begin(self, now_s: float) -> None:
        """One request was posted."""
        if not self._open:
            self._since_s = now_s
        self._open += 1

    def end(self, now_s: float, moved_bytes: int) -> None:
        """One request ended."""
        self._open -= 1
        self._counters.busy_bytes += moved_bytes
        if not self._open:
            self._counters.busy_s += now_s - self._since_s
