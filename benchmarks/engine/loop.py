"""Many requests at once through the real engine loop: scheduler, cache manager, sampler."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
from typing_extensions import override

from benchmarks.engine.steps import Run, Step
from benchmarks.engine.workloads import Load
from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.storage import TorchStorage
from transfer.agent_figures import TransferFigures
from transfer.identity import Incarnation
from worker.core import MonotonicClock
from worker.demand import PageDemand
from worker.engine import Engine, EngineLimits, EngineParts
from worker.inbox import FrontEndCommand
from worker.messages import Generate, SamplingParams, StepOutput, StopRule
from worker.model.loader import LoadedModel
from worker.ports import Executor, Output, Transfers
from worker.prefixes import PullLimits
from worker.ranks import RankManager

DEADLINE_MS = 3_600_000
MAX_RUNNING = 256
TOKEN_BYTES = 4


class NoTransfers:
    """All that is asked of an agent where every request is computed and decoded in one place."""

    refusals: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    figures = TransferFigures()


class Collected(Output):
    """Steps whose tokens came out, and how requests ended."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.outcomes: list[str] = []

    @override
    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        tokens = 0
        for _, output in outputs:
            tokens += sum(len(run.tokens) // TOKEN_BYTES for run in output.runs)
            self.outcomes += [f"{leg.outcome} {leg.message}".strip() for leg in output.ended]
        if tokens:
            self.steps.append(Step(time.perf_counter(), tokens))

    @override
    def broadcast(self, output: StepOutput) -> None:
        pass


class Loop:
    """One engine over one executor, driven by the calling thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: LayoutPlan,
        storage: TorchStorage,
        executor: Executor,
        max_batch_tokens: int,
    ) -> None:
        self._collected = Collected()
        self._vocab = loaded.vocab_size
        self._sent = 0
        demand = PageDemand(plan, max_chunk_tokens=max_batch_tokens)
        manager = RankManager(
            UnifiedKVCacheManager(plan, storage.slots, storage, incarnation="benchmark")
        )
        self._engine = Engine(
            EngineParts(
                incarnation=Incarnation.mint("benchmark"),
                manager=manager,
                transfers=cast(Transfers, NoTransfers()),
                executor=executor,
                output=self._collected,
                clock=MonotonicClock(),
                demand=demand,
            ),
            EngineLimits(
                max_sequence_tokens=demand.longest(manager.total_slots()),
                vocab_size=loaded.vocab_size,
                max_batch_tokens=max_batch_tokens,
                max_running=MAX_RUNNING,
                quarantine_limit_blocks=64,
                quarantine_grace_ms=15_000,
                pulls=PullLimits(),
            ),
        )

    def run(self, load: Load) -> Run:
        """All requests at once, until the last token of the last one.

        Raises:
            RuntimeError: a request ended otherwise than with all its tokens.
        """
        random = np.random.default_rng(self._sent)
        items = [self._command(random, load) for _ in range(load.requests)]
        collected = self._collected
        collected.steps.clear()
        collected.outcomes.clear()
        began = time.perf_counter()
        self._engine.turn(items)
        while len(collected.outcomes) < load.requests:
            if not self._engine.turn([]):
                raise RuntimeError("expected the engine to go on until every request has ended")
        run = Run(load, began, tuple(collected.steps))
        if run.tokens != load.requests * load.output:
            raise RuntimeError(
                f"expected {load.requests * load.output} tokens, got {run.tokens}; requests ended: "
                f"{sorted(set(collected.outcomes))}"
            )
        return run

    def _command(self, random: np.random.Generator, load: Load) -> FrontEndCommand:
        self._sent += 1
        tokens = random.integers(0, self._vocab, load.prompt).astype(np.int32)
        return FrontEndCommand(
            1,
            Generate(
                request_id=f"r{self._sent}",
                tokens=tokens.tobytes(),
                scope=b"",
                sampling=SamplingParams(temperature=0.0),
                stop=StopRule(max_tokens=load.output),
                source=None,
                deadline_ms=DEADLINE_MS,
            ),
        )
