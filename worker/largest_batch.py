"""The largest step that a worker may be asked for, to be run once for the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvcache_core.arithmetic import ceil_div
from kvcache_core.layout import LayoutPlan
from worker.messages import SamplingParams
from worker.ports import Draw, Slice

WIDEST_DRAW: Final = SamplingParams(seed=1, repetition_penalty=1.1, logprobs=20)
"""Noise for every token takes more than a filter, whose rows are cut to their likeliest tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Bounds of a step. Each is at least 1."""

    max_batch_tokens: int
    max_running: int
    max_sequence_tokens: int

    def largest(self) -> tuple[int, ...]:
        """New tokens of each sequence: as many sequences as there may be, then as many tokens."""
        count = min(self.max_running, self.max_batch_tokens)
        chunks = min(count, ceil_div(self.max_batch_tokens, self.max_sequence_tokens))
        left = self.max_batch_tokens - (count - chunks)
        lengths = [1] * (count - chunks)
        for later in reversed(range(chunks)):
            lengths.append(min(self.max_sequence_tokens, left - later))
            left -= lengths[-1]
        return tuple(lengths)


def largest_batch(plan: LayoutPlan, slots: Sequence[int], limits: BatchLimits) -> list[Slice]:
    """Slices of that step, each at the end of the longest sequence, over pools of ``slots`` per
    pool group that may be far too small for it: sequences share slots, what they hold means
    nothing.
    """
    end = limits.max_sequence_tokens
    blocks = np.arange(plan.blocks(end), dtype=np.int32)
    tables = tuple(blocks % slots[group.pool_group] for group in plan.layer_groups)
    tokens = np.zeros(end, dtype=np.int32)
    nothing = tokens[:0]
    draws = (Draw(WIDEST_DRAW, 0, 0, tokens[:1], nothing, ()),)
    return [
        Slice(number, tokens[:length], end - length, tables, draws)
        for number, length in enumerate(limits.largest())
    ]
