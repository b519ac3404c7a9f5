"""Exact counts of what a manager did since it was made; they only grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache_core.branch_choice import BranchChoice


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
    host_matched_tokens: int = 0
    """Matched tokens of blocks that had a page on the host."""
    partial_matches: int = 0
    """Matches that ended inside a block."""
    pages_created: int = 0
    pages_copied: int = 0
    pages_demoted: int = 0
    """Moved to the host when the device needed room."""
    pages_onboarded: int = 0
    """Brought back from the host."""
    pages_evicted: int = 0
    """Cached pages lost for room, on whichever tier."""
    pages_rebased: int = 0
    """Own pages dropped at commit because the tree had the same block."""
    grows_refused: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    snapshots_recorded: int = 0
    snapshots_skipped: int = 0
    """Pending snapshots given up because nothing needed them or pages were missing."""
    snapshot_pruned_tokens: int = 0
    """Known tokens not reused because no snapshot of states stood there."""
    page_pruned_tokens: int = 0
    """Known tokens not reused because pages were missing."""
    snapshots_asked: int = 0
    """Snapshot points that requests were asked for."""
    prefix_waits: int = 0
    """Times a request waited for blocks that another one was computing."""
    branches: Counter[BranchChoice] = field(default_factory=Counter)
    """Branch points taken, and skipped by reason."""
    leases_opened: int = 0
    leases_released: int = 0
    leases_quarantined: int = 0
