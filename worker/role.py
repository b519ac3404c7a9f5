"""What the one engine loop asks of a role. Context and generation are the two, and every worker has
both.

These are the complete set: a role decides what a leg waits for and what becomes of its tokens;
pages, budget and order are the loop's business alike for all.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from typing import Protocol

from transfer.agent_events import SessionEnded
from worker.ports import Drawn
from worker.requests import LegRecord, Sequence


class Role(Protocol):
    """Strategy of one kind of leg."""

    def opened(self, sequence: Sequence) -> None:
        """The sequence got its pages: ``sequence.cache`` holds what matched, and its first chunk is
        about to run.
        """

    def land(self, leg: LegRecord) -> bool:
        """There is room for what a peer is to write: allocate pages, or ask for it. False, and
        nothing changed, while pages are short.
        """

    def computed(self, sequence: Sequence, drawn: Values[Drawn]) -> None:
        """KV is final up to ``sequence.computed``; ``drawn`` has one token a choice when the last
        token was reached.
        """

    def session_ended(self, leg: LegRecord, event: SessionEnded) -> None:
        """The transfer of a living leg has its outcome."""

    def expire(self, now_ms: int) -> None:
        """Drop what was remembered for too long."""

    def next_expiry_ms(self) -> int | None:
        """When ``expire`` next has something to do."""
