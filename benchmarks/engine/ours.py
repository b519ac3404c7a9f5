"""The engine's own figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks.engine.contest import Entrant, Sample
from benchmarks.engine.figures import OURS
from benchmarks.engine.loop import MAX_RUNNING, Loop
from benchmarks.engine.shape import TOKENS_PER_BLOCK, ModelShape, make_model, make_pages
from benchmarks.engine.steps import Run
from benchmarks.engine.workloads import Load, Workloads
from worker.executor import ModelExecutor
from worker.model.assembly import BucketedSteps, StepLimits

SPARE_BLOCKS: Final = 64


@dataclass(frozen=True)
class EngineLimits:
    """``depth``: steps under way. ``max_batch_tokens``: of one step."""

    depth: int
    max_batch_tokens: int


class Ours:
    """One model, its pages, its runner, and the engine loop over them."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        asked: Workloads,
        limits: EngineLimits,
    ) -> None:
        self._asked = asked
        with torch.inference_mode():
            self._loaded = make_model(shape, device, dtype)
            loads = (asked.decode, asked.prefill, asked.wide, *asked.loads.values())
            blocks = max(load.requests * _blocks(load) for load in loads) + SPARE_BLOCKS
            self._plan, self._storage = make_pages(self._loaded, blocks)
            step_limits = StepLimits(MAX_RUNNING, asked.longest)
            runner = BucketedSteps(self._loaded).runner(self._plan, self._storage, step_limits)
        executor = ModelExecutor(runner, device, limits.depth)
        tokens = limits.max_batch_tokens
        self._loop = Loop(self._loaded, self._plan, self._storage, executor, tokens)

    def first_tokens(self) -> None:
        """A prompt's token and one more: kernels are compiled and the first graph is captured."""
        self._run(Load(1, 1, 2))

    def entrants(self) -> dict[str, Entrant]:
        """By key."""
        asked = self._asked
        samples: dict[str, Sample] = {
            "decode_b1_tok_s": lambda: self._run(asked.decode).decode_tok_s(),
            "prefill_8k_ms": lambda: self._run(asked.prefill).first_step_ms(),
            "b64_4k_step_ms": lambda: self._run(asked.wide).whole_step_ms(),
        }
        for key, load in asked.loads.items():
            samples[key] = partial(self._load_tok_s, load)
        # An interpreter has nothing to warm up.
        ready = _warmed if self._loaded.device.type == "cuda" else _cold
        return {key: Entrant(OURS, key, partial(ready, sample)) for key, sample in samples.items()}

    def _load_tok_s(self, load: Load) -> float:
        return self._run(load).tok_s()

    def _run(self, load: Load) -> Run:
        with torch.inference_mode():
            return self._loop.run(load)


def _blocks(load: Load) -> int:
    """Of one sequence."""
    return -(-(load.prompt + load.output) // TOKENS_PER_BLOCK)


@contextmanager
def _cold(sample: Sample) -> Iterator[Sample]:
    yield sample


@contextmanager
def _warmed(sample: Sample) -> Iterator[Sample]:
    """What is met for the first time is compiled and captured, seconds that come once."""
    sample()
    yield sample
