"""What both ends of a prefix pull know: its bounds, and how a prefix is matched in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.ports import CacheManager, CacheSequence


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of prefix pulls."""

    least_tokens: int = 256
    """A pull that saves less is not worth it: computing is as fast."""
    timeout_ms: int = 10_000
    """A prompt waits no longer than this for a prefix that it can compute."""
    most_served: int = 4
    """Pulls that one worker serves at once; each keeps the pages of its prefix from eviction."""


def open_whole_blocks(
    manager: CacheManager, scope: bytes, tokens: npt.NDArray[np.int32], *, max_match: int
) -> CacheSequence:
    """A sequence that holds the longest reusable prefix of whole blocks, at most ``max_match``
    tokens.
    """
    block = manager.tokens_per_block
    limit = max_match // block * block
    while True:
        cache = manager.open(scope, tokens, max_match=limit)
        matched = cache.matched_tokens
        if matched % block == 0:
            return cache
        cache.close()
        limit = matched // block * block
