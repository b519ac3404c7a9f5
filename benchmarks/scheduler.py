"""``python -m benchmarks.scheduler``: what a step costs beside the model, in thread CPU time.

A real engine and page manager over a model that computes nothing: ``--running`` sequences decode,
each with ``--prompt`` tokens and output of its own, pages of 64 tokens, one full-attention and one
windowed layer group. ``scheduler_ms`` is what comes before the model in a step: survey, plans,
pages, slices. ``turn_ms`` is all of a turn: with results, commits and token messages. The
scheduler's figure again with ``--waiting`` long prompts that find no slots (``short_of_slots_ms``),
and after that with one that prefills beside, until all rows are taken (``prefilling_ms``).
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from typing_extensions import override

from benchmarks import options, report
from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier, SlotArray
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from transfer.agent_figures import TransferFigures
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.prefix import Prefix
from transfer.wire import pack_ints
from worker.demand import PageDemand
from worker.engine import Engine, EngineLimits, EngineParts
from worker.inbox import FrontEndCommand
from worker.messages import Generate, SamplingParams, StepOutput, StopRule
from worker.ports import (
    Clock,
    Drawn,
    EndedStep,
    Executor,
    LaunchedStep,
    Output,
    Slice,
    StepRows,
    Transfers,
)
from worker.prefixes import PullLimits
from worker.ranks import RankManager

TOKENS_PER_BLOCK: Final = 64
WINDOW: Final = 1024
VOCABULARY: Final = 32_000
STEP_TOKENS: Final = 2048
LONG_STEPS: Final = 60
"""Steps that the long prompt takes at least."""
LIMIT_MS: Final = 2.0
"""Most that the scheduler may cost a step with 256 running sequences."""


class NoCopies(PageCopier):
    """Pages without bytes."""

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        """Nothing to copy."""

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Nothing to copy."""

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        """Nothing to copy."""


class NoModel(Executor):
    """Draws the same token everywhere."""

    @property
    @override
    def depth(self) -> int:
        return 1

    @override
    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        return EndedStep([tuple(Drawn(7, None) for _ in part.draws) for part in slices])


class NoTransfers(Transfers):
    """Aggregated requests need none."""

    @override
    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None:
        raise NotImplementedError

    @override
    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        raise NotImplementedError

    @override
    def announce(self, request_id: str) -> None:
        raise NotImplementedError

    @override
    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        raise NotImplementedError

    @override
    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        raise NotImplementedError

    @override
    def no_decode(self, request_id: str) -> None:
        raise NotImplementedError

    @override
    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None:
        raise NotImplementedError

    @override
    def found(self, request_id: str, end_block: int) -> None:
        raise NotImplementedError

    @override
    def decline(self, request_id: str, reason: str) -> None:
        raise NotImplementedError

    @override
    def cancel(self, request_id: str, reason: str) -> None:
        raise NotImplementedError

    @override
    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        raise NotImplementedError

    @property
    @override
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        return {}

    @property
    @override
    def figures(self) -> TransferFigures:
        return TransferFigures()


class StampedManager(RankManager):
    """Notes when a step is planned: it is told right before the model is."""

    planned_at_ns = 0
    decode_tokens = 0

    @override
    def run_step(self, step: int, slices: Sequence[Slice], rows: StepRows) -> None:
        self.planned_at_ns = time.thread_time_ns()
        self.decode_tokens += sum(len(part.tokens) == 1 for part in slices)


class NoOutput(Output):
    """Nobody listens."""

    @override
    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        """Dropped."""

    @override
    def broadcast(self, output: StepOutput) -> None:
        """Dropped."""


class RealClock(Clock):
    """Milliseconds of this process."""

    @override
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class MeasuredEngine:
    """An engine with requests of its own; each turn is timed in thread CPU nanoseconds."""

    def __init__(self, *, running: int, slots: int) -> None:
        plan = _plan()
        self.scheduler_ns: list[int] = []
        self.turn_ns: list[int] = []
        self._requests = 0
        self._rng = np.random.default_rng(1)
        self._manager = StampedManager(
            UnifiedKVCacheManager(
                plan, [slots] * len(plan.pool_groups), NoCopies(), incarnation="benchmark"
            )
        )
        self._engine = Engine(
            EngineParts(
                incarnation=Incarnation.mint("benchmark"),
                manager=self._manager,
                transfers=NoTransfers(),
                executor=NoModel(),
                output=NoOutput(),
                clock=RealClock(),
                demand=PageDemand(plan, max_chunk_tokens=STEP_TOKENS),
            ),
            EngineLimits(
                max_sequence_tokens=1 << 20,
                vocab_size=VOCABULARY,
                max_batch_tokens=STEP_TOKENS,
                max_running=running,
                quarantine_limit_blocks=64,
                quarantine_grace_ms=1000,
                pulls=PullLimits(),
            ),
        )

    def request(self, tokens: int, outputs: int) -> FrontEndCommand:
        """A request with a prompt of its own."""
        self._requests += 1
        prompt = self._rng.integers(0, VOCABULARY, tokens, dtype=np.int32)
        return FrontEndCommand(
            1,
            Generate(
                request_id=f"r{self._requests}",
                tokens=pack_ints(prompt),
                scope=b"benchmark",
                sampling=SamplingParams(),
                stop=StopRule(max_tokens=outputs),
                n=1,
                source=None,
                deadline_ms=10**9,
            ),
        )

    @property
    def decode_tokens(self) -> int:
        """Tokens decoded so far."""
        return self._manager.decode_tokens

    def turn(self, items: Sequence[FrontEndCommand] = ()) -> None:
        """One turn of the engine."""
        before = time.thread_time_ns()
        self._engine.turn(items)
        self.turn_ns.append(time.thread_time_ns() - before)
        self.scheduler_ns.append(self._manager.planned_at_ns - before)

    def hold_slots(self, left: int) -> None:
        """Take all free slots but ``left``."""
        tokens = (self._manager.available_slots()[0] - left) * TOKENS_PER_BLOCK
        self._held = self._manager.open(b"", np.empty(0, dtype=np.int32), max_match=0)
        assert self._held.grow_to_receive(tokens - WINDOW - 2 * TOKENS_PER_BLOCK)

    def give_slots_back(self) -> None:
        """Undo :meth:`hold_slots`."""
        self._held.close()

    def forget(self) -> None:
        """Begin the measurement."""
        self.turn_ns.clear()
        self.scheduler_ns.clear()


def decoding(running: int, prompt: int, outputs: int) -> MeasuredEngine:
    """An engine in which ``running`` sequences decode."""
    blocks = -(-(prompt + outputs) // TOKENS_PER_BLOCK) + 1
    engine = MeasuredEngine(
        running=running + 1,
        slots=3 * (running + 1) * blocks + LONG_STEPS * STEP_TOKENS // TOKENS_PER_BLOCK,
    )
    items = [engine.request(prompt, outputs) for _ in range(running)]
    engine.turn(items)
    for _ in range(2 * running * prompt // STEP_TOKENS):
        engine.turn()
    engine.forget()
    return engine


def _plan() -> LayoutPlan:
    return LayoutPlan.derive(
        [
            KVCacheLayerSpec(
                layer_id=layer,
                owner=KVCacheLayerOwner.TARGET,
                dtype=ElementType.BFLOAT16,
                num_kv_heads=1,
                head_dim=8,
                window=window,
            )
            for layer, window in enumerate((None, WINDOW))
        ],
        tokens_per_block=TOKENS_PER_BLOCK,
    )


def _ms(samples: Sequence[int]) -> float:
    return round(statistics.median(samples) / 1e6, 3)


def main() -> None:
    """Measure and print."""
    parser = options.parser("scheduler", __doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="print where turns spend their time")
    arguments = parser.parse_args()
    outputs = 4 * arguments.steps + arguments.running
    engine = decoding(arguments.running, arguments.prompt, outputs)
    gc.collect()
    gc.freeze()
    for _ in range(arguments.steps):
        engine.turn()
    result: dict[str, object] = {
        "scheduler_ms": _ms(engine.scheduler_ns),
        "scheduler": report.quantiles([one / 1e6 for one in engine.scheduler_ns]),
        "turn_ms": _ms(engine.turn_ns),
        "limit_ms": LIMIT_MS,
        "running": arguments.running,
    }
    engine.forget()
    engine.hold_slots(4 * arguments.running)
    long = STEP_TOKENS * LONG_STEPS
    engine.turn([engine.request(long, 1) for _ in range(arguments.waiting)])
    engine.forget()
    for _ in range(arguments.steps // 3):
        engine.turn()
    result["short_of_slots_ms"] = _ms(engine.scheduler_ns)
    engine.give_slots_back()
    engine.turn()
    engine.forget()
    for _ in range(LONG_STEPS - 4):
        engine.turn()
    result["prefilling_ms"] = _ms(engine.scheduler_ns)
    for name, value in result.items():
        print(f"{name:>18} {value}")
    if arguments.profile:
        with cProfile.Profile() as profile:
            for _ in range(arguments.steps // 4):
                engine.turn()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    report.finish(result, arguments.out)


if __name__ == "__main__":
    main()
