"""Prompts that wait for a prefix which a running sequence computes now, instead of computing it a
second time.

A wait is over when the blocks are there, when nobody computes them any more, or after as many steps
as their tokens take with a quarter of each step's budget, whichever is first: it costs no more than
a small multiple of what it saves. Only running sequences announce blocks, so nobody waits for one
that waits. Where states decide on reuse, whoever computes the prefix is asked to keep its state at
the end of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.desk import Desk
from worker.requests import Sequence, SequenceState


@dataclass(frozen=True, eq=False, slots=True)
class PrefixWaits:
    """Decides on waits; what a sequence waits for is kept with it."""

    desk: Desk
    max_batch_tokens: int

    def begin(self, sequence: Sequence) -> bool:
        """Whether the queued ``sequence`` waits from now on for what somebody computes."""
        steps = self.desk.counters.steps
        if sequence.wait_until_step is not None and steps >= sequence.wait_until_step:
            return False
        tokens = sequence.tokens.span(0, len(sequence.tokens) - 1)
        prefix = self.desk.manager.awaited_prefix(sequence.leg.scope, tokens)
        if prefix is None:
            return False
        if self.desk.manager.keeps_states and not self._ask_owner(sequence, prefix.end_tokens):
            return False  # its state would not be kept there
        if sequence.wait_until_step is None:
            patience = 2 - (-4 * prefix.tokens // self.max_batch_tokens)
            sequence.wait_until_step = steps + patience
        sequence.awaited_key = prefix.key
        return True

    def _ask_owner(self, sequence: Sequence, end: int) -> bool:
        """Ask whoever computes the first ``end`` tokens to keep its state there."""
        wanted = sequence.tokens.span(0, end)
        for owner in self.desk.sequences.values():
            if (
                owner.state is SequenceState.RUNNING
                and owner.leg.scope == sequence.leg.scope
                and owner.computed < end <= len(owner.tokens)
                and np.array_equal(owner.tokens.span(0, end), wanted)
            ):
                if end not in owner.snapshot_points:
                    owner.snapshot_points = tuple(sorted((*owner.snapshot_points, end)))
                    self.desk.manager.count_snapshots_asked(1)
                return True
        return False

    def holds(self, sequence: Sequence) -> bool:
        """Whether it still waits; once it does not, it never waits for the same again."""
        key, until_step = sequence.awaited_key, sequence.wait_until_step
        if key is None or until_step is None:
            return False
        if self.desk.counters.steps < until_step and self.desk.manager.is_announced(key):
            return True
        sequence.awaited_key = None
        sequence.uncached_tokens = None  # what it waited for may not be there
        return False
