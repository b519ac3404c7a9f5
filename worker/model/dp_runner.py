"""One rank's forward under attention data parallelism: all ranks step together, each with its own
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.model.dp_ranks import DpRanks
from worker.model.runner import ModelRunner
from worker.model.step import SequenceSlice

DUMMY_ROWS = 1
"""Rows of a rank that has no sequence in a step."""


class DpRunner:
    """Runs steps of one rank together with the others."""

    def __init__(self, runner: ModelRunner, ranks: DpRanks) -> None:
        self._runner = runner
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self._ranks.shard.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._ranks.shard.size

    def forget(self) -> None:
        """Owners of sequences mean others from now on."""
        self._runner.forget()

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[SequenceSlice], rows: Sequence[int], draws: Sequence[int]
    ) -> torch.Tensor:
        """Compute this rank's ``batch``, which may be empty, while the others compute theirs.

        ``rows`` and ``draws`` are the tokens and the slices with wanted logits of every rank, the
        same on all of them.

        Returns:
            On the leader float32 ``[sum of draws, vocab_size]``, in order of ranks and of each
            one's batch; elsewhere no row.

        Raises:
            AttentionInputError: the batch is inconsistent with the plan or the pool. Nothing was
                computed here, and the others wait until this rank is gone.
        """
        self._ranks.begin([max(count, DUMMY_ROWS) for count in rows], draws)
        logits = self._runner.forward(batch) if batch else self._runner.idle()
        return self._ranks.to_leader(logits)
