"""Exact counts of what a manager did since it was made; they only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """Pages are counted per layer group, blocks once."""

    sequences_opened: int = 0
    sequences_closed: int = 0
    sequences_forked: int = 0
    sequences_suspended: int = 0
    sequences_resumed: int = 0
    queried_tokens: int = 0
    """Tokens that could have matched at open."""
    matched_tokens: int = 0
    """Tokens that did."""
    partial_matches: int = 0
    """Matches that ended inside a block."""
    pages_created: int = 0
    pages_copied: int = 0
    pages_evicted: int = 0
    pages_rebased: int = 0
    """Own pages dropped at commit because the tree had the same block."""
    grows_refused: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    snapshots_recorded: int = 0
    leases_opened: int = 0
    leases_released: int = 0
    leases_quarantined: int = 0
