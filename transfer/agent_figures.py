"""What others see of an agent: its pairs and totals, as values that no longer change."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.agent_pair import Side
from transfer.identity import RankId


@dataclass(frozen=True, slots=True)
class PairState:
    """One pair that is connected, or one that is wanted and is not."""

    side: Side
    """Of this rank."""
    peer: RankId
    lane: str
    """Kind of the transport that carries the pages; empty while not connected."""
    reason: str
    """Why it is not connected; empty when it is."""


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """Totals are monotone over the life of the agent."""

    pairs: tuple[PairState, ...] = ()
    late_dials: int = 0
    """Requests whose context rank was dialled only when they came."""
    busy_ms: int = 0
    """Time in which page requests were under way, over all pairs."""
    busy_bytes: int = 0
    """Page bytes moved in that time."""
    staged_bytes: int = 0
    """Page bytes that a gather or a scatter copied here."""
    staging_bytes: int = 0
    """Memory of all staging buffers now; no quota counts it."""
