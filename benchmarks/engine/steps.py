"""Single steps through the runner: decode at batch 1, a prefill, a large batch at long context."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.engine.shape import TOKENS_PER_BLOCK
from benchmarks.timing import once, wait
from worker.model.runner import ModelRunner, SequenceSlice


class Steps:
    """Sequences over hand-made block tables: no scheduler, no sampler but an argmax."""

    def __init__(self, runner: ModelRunner, device: torch.device, groups: int) -> None:
        self._runner = runner
        self._device = device
        self._groups = groups

    def decode_tok_s(self, prompt: int, generated: int) -> float:
        """Tokens a second of one sequence after the first of ``generated``; each token is on the
        host before the next step.
        """
        table = np.arange(-(-(prompt + generated) // TOKENS_PER_BLOCK), dtype=np.int32)
        self._forward([self._slice(np.zeros(prompt, np.int32), 0, table)])
        wait(self._device)
        token = 0
        began = time.perf_counter()
        for at in range(prompt, prompt + generated - 1):
            token = self._next(token, at, table)
        return (generated - 1) / (time.perf_counter() - began)

    def prefill_ms(self, tokens: int) -> float:
        """One prompt in one step."""
        table = np.arange(-(-tokens // TOKENS_PER_BLOCK), dtype=np.int32)
        piece = self._slice(np.zeros(tokens, np.int32), 0, table)
        return once(lambda: self._forward([piece]), self._device) * 1000

    def decode_step_ms(self, sequences: int, context: int) -> float:
        """One step of as many sequences, each with a context of its own."""
        width = -(-(context + 1) // TOKENS_PER_BLOCK)
        tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
        batch = [self._slice(np.ones(1, np.int32), context, table) for table in tables]
        return once(lambda: self._forward(batch), self._device) * 1000

    def _next(self, token: int, at: int, table: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        return int(self._forward([self._slice(np.array([token], np.int32), at, table)]).argmax())

    def _slice(
        self,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        start: int,
        table: np.ndarray[tuple[int], np.dtype[np.int32]],
    ) -> SequenceSlice:
        return SequenceSlice(tokens, start, (table,) * self._groups, wants_logits=True)

    def _forward(self, batch: list[SequenceSlice]) -> torch.Tensor:
        return self._runner.forward(batch)
