"""The engine's own figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from benchmarks.engine.contest import Entrant, Sample
from benchmarks.engine.figures import OURS
from benchmarks.engine.loop import MAX_RUNNING, Loop
from benchmarks.engine.shape import TOKENS_PER_BLOCK, ModelShape, make_model, make_pages
from benchmarks.engine.steps import Steps
from benchmarks.engine.workloads import Load, Workloads
from worker.executor import ModelExecutor
from worker.model.assembly import BucketedSteps, StepLimits

CHUNK_TOKENS: Final = 8192
SPARE_BLOCKS: Final = 64


class Ours:
    """One model, its pages, its runner; the loop is made when it is first asked for."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        asked: Workloads,
        depth: int,
    ) -> None:
        """``depth``: steps under way in the engine loop."""
        self._asked = asked
        with torch.inference_mode():
            self._loaded = make_model(shape, device, dtype)
            wide = asked.wide
            blocks = wide.requests * -(-(wide.prompt + 1) // TOKENS_PER_BLOCK)
            blocks = max(blocks, asked.prefill_tokens // TOKENS_PER_BLOCK) + SPARE_BLOCKS
            self._plan, self._storage = make_pages(self._loaded, blocks)
            longest = max(asked.prefill_tokens, asked.longest - 1)
            limits = StepLimits(MAX_RUNNING, longest)
            self._runner = BucketedSteps(self._loaded).runner(self._plan, self._storage, limits)
        self._executor = ModelExecutor(self._runner, device, depth)
        self._steps = Steps(self._runner, device, len(self._plan.layer_groups))
        self._loop: Loop | None = None

    def first_tokens(self) -> None:
        """A prompt's token and one more: kernels are compiled and the first graph is captured."""
        with torch.inference_mode():
            self._steps.decode_tok_s(1, 2)

    def entrants(self) -> dict[str, Entrant]:
        """By key."""
        asked, steps = self._asked, self._steps
        samples: dict[str, Sample] = {
            "decode_b1_tok_s": lambda: steps.decode_tok_s(asked.decode.prompt, asked.decode.output),
            "prefill_8k_ms": lambda: steps.prefill_ms(asked.prefill_tokens),
            "b64_4k_step_ms": lambda: steps.decode_step_ms(asked.wide.requests, asked.wide.prompt),
        }
        for key, load in asked.loads.items():
            samples[key] = partial(self._load_tok_s, load)
        # An interpreter has nothing to warm up.
        ready = _warmed if self._loaded.device.type == "cuda" else _cold
        return {key: Entrant(OURS, key, partial(ready, sample)) for key, sample in samples.items()}

    def _load_tok_s(self, load: Load) -> float:
        if self._loop is None:
            self._loop = Loop(self._loaded, self._plan, self._storage, self._executor, CHUNK_TOKENS)
        return self._loop.tok_s(load)


@contextmanager
def _cold(sample: Sample) -> Iterator[Sample]:
    def measured() -> float:
        with torch.inference_mode():
            return sample()

    yield measured


@contextmanager
def _warmed(sample: Sample) -> Iterator[Sample]:
    """What is met for the first time is compiled and captured, seconds that come once."""
    with _cold(sample) as measured:
        measured()
        yield measured
