"""How long a session may go without progress: a floor plus an allowance for the bytes under way.

A deadline that passes changes the outcome, then the connection, never memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Times a session waits for its peer."""

    floor_ms: int = 10_000
    """Without progress of posted requests, whatever their size."""
    least_bytes_per_ms: int = 10_000
    """Slowest transfer that still counts as one: adds ``bytes / least_bytes_per_ms``."""
    drain_ms: int = 5_000
    """From a decided outcome until the peer is dropped, and again until open posts are in doubt."""

    def __post_init__(self) -> None:
        if min(self.floor_ms, self.least_bytes_per_ms, self.drain_ms) < 1:
            raise ValueError(f"limits must be at least 1, got {self}")

    def progress_ms(self, open_bytes: int) -> int:
        """Longest time between two ends of posts while ``open_bytes`` are under way."""
        return self.floor_ms + open_bytes // self.least_bytes_per_ms

    def draining_ms(self, open_bytes: int) -> int:
        """The same after the outcome was decided."""
        return self.drain_ms + open_bytes // self.least_bytes_per_ms
