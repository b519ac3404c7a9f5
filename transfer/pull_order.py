"""A prefix pull as the engine orders it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transfer.identity import PeerAddress
from transfer.prefix import Prefix
from transfer.pull_session import PullSession
from transfer.session_events import PullRequested


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Ask ``sources``, all ranks of one dp group, for ``prefix``: all is over at ``end_s`` of the
    loop's clock.
    """

    request_id: str
    sources: tuple[PeerAddress, ...]
    prefix: Prefix
    least_blocks: int
    end_s: float
    prompt_tokens: ClassVar[None] = None
    """Pages reach up to what is found, which is not known yet."""
    session_type: ClassVar[type[PullSession]] = PullSession

    def opening(self, left_ms: int, receivers: int) -> PullRequested:
        """What starts each session."""
        return PullRequested(self.prefix, self.least_blocks, left_ms, receivers)
