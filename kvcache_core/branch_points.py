"""Where a prompt leaves all known ones: a snapshot of states there serves the next one that does.

The point is what the cache knows of the prompt, rounded down to a block. It is worth a snapshot
only where the request has still to compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_core.branch_choice import BranchChoice
from kvcache_core.reuse import Reuse


@dataclass(frozen=True, kw_only=True)
class BranchPoint:
    """``tokens`` is where the snapshot belongs, 0 unless TAKEN."""

    choice: BranchChoice
    tokens: int


def branch_point(
    reuse: Reuse, *, looked_up_tokens: int, prompt_tokens: int, position: int, tokens_per_block: int
) -> BranchPoint:
    """The branch point of a request that has ``position`` tokens and computes ``prompt_tokens``.

    ``reuse`` is the answer for its first ``looked_up_tokens`` tokens.
    """
    point = reuse.known_tokens // tokens_per_block * tokens_per_block
    if not reuse.known_tokens:
        choice = BranchChoice.NO_FRESH_MATCH
    elif reuse.known_tokens >= looked_up_tokens:
        choice = BranchChoice.NO_DIVERGENCE
    elif not point:
        choice = BranchChoice.ALIGNED_TO_ZERO
    elif point <= position:
        choice = BranchChoice.ALREADY_REUSED
    elif point >= prompt_tokens:
        choice = BranchChoice.AT_PROMPT_END
    else:
        return BranchPoint(choice=BranchChoice.TAKEN, tokens=point)
    return BranchPoint(choice=choice, tokens=0)
