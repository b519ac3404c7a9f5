"""Preemption with a real model: what was computed again gives the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from benchmarks.scheduler import NoTransfers
from tests.support.oracle import ReferenceModel, check_equal
from tests.support.sim_network import VirtualClock
from transfer.identity import Incarnation
from transfer.wire import pack_ints, unpack_ints
from worker.config import WorkerConfig
from worker.core import load_core, make_engine
from worker.inbox import FrontEndCommand
from worker.messages import Generate, SamplingParams, StepOutput, StopRule, WorkerGauges
from worker.ports import Output

PROMPT, OUTPUT, BLOCK = 8, 56, 8
ALONE = (PROMPT + OUTPUT) // BLOCK
BLOCK_BYTES = 3 * 2 * 2 * 16 * 4 * BLOCK
"""Layers, keys and values, heads, head size, float32: of the tiny model."""


class Heard(Output):
    """Tokens by request, outcomes, the last gauges."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.outcomes: list[str] = []
        self.gauges: WorkerGauges | None = None

    @override
    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        for _, output in outputs:
            for run in output.runs:
                self.tokens.setdefault(run.request_id, []).extend(unpack_ints(run.tokens).tolist())
            self.outcomes += [ended.outcome for ended in output.ended]

    @override
    def broadcast(self, output: StepOutput) -> None:
        self.gauges = output.gauges


def test_four_long_generations_in_pages_for_one_and_a_half_are_equal_to_the_oracle(
    tiny_model: Callable[[str], Path],
) -> None:
    path = tiny_model("llama")
    config = WorkerConfig(
        incarnation=Incarnation.mint("w"),
        role="aggregated",
        model_path=str(path),
        model_name="tiny",
        dtype="float32",
        cluster_token="none is dialled",
        tokens_per_block=BLOCK,
        kv_cache_bytes=ALONE * 3 // 2 * BLOCK_BYTES,
        max_batch_tokens=16,
    )
    core = load_core(config, None, lambda _: None)
    assert core.storage.slots == (ALONE * 3 // 2,)
    heard = Heard()
    engine = make_engine(core, config, NoTransfers(), heard, VirtualClock(), ())
    rng = np.random.default_rng(1)
    prompts = {f"r{index}": rng.integers(0, 256, PROMPT).tolist() for index in range(4)}
    params = SamplingParams(temperature=0.9, seed=3)
    requests = [
        FrontEndCommand(
            1,
            Generate(
                request_id=name,
                tokens=pack_ints(prompt),
                scope=b"",
                sampling=params,
                stop=StopRule(max_tokens=OUTPUT),
                source=None,
                deadline_ms=10**9,
            ),
        )
        for name, prompt in prompts.items()
    ]
    while engine.turn(requests):
        requests = []
    assert heard.outcomes == ["succeeded"] * 4
    assert heard.gauges is not None
    assert 1 <= heard.gauges.preemptions_total <= 6
    assert core.pages.available_blocks() == ALONE * 3 // 2
    core.pages.check()
    model = ReferenceModel(path)
    for name, prompt in prompts.items():
        assert len(heard.tokens[name]) == OUTPUT
        report = check_equal(model, prompt, heard.tokens[name], params)
        assert report.ok, report
