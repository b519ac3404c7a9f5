"""The outcomes of looking for a branch point (branch_points.py), counted by reason."""

from __future__ import annotations

from enum import Enum


class BranchChoice(Enum):
    """Whether a branch point is taken, or why not."""

    TAKEN = "taken"
    NO_FRESH_MATCH = "no_fresh_match"
    NO_DIVERGENCE = "no_divergence"
    ALIGNED_TO_ZERO = "aligned_to_zero"
    ALREADY_REUSED = "already_reused"
    AT_PROMPT_END = "at_prompt_end"
