"""Conversations whose turns run on different context workers: real workers, a tiny model, UCX.

Each turn is judged by the oracle, and says how much of its prompt was fetched instead of computed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import TinyModels
from tests.support.oracle import ReferenceModel, check_equal
from tests.support.raw_front_end import RawFrontEnd, WorkerRun, start_workers
from transfer.identity import Incarnation
from transfer.wire import pack_ints
from worker.config import WorkerConfig
from worker.messages import Generate, Prefill, PrefixSource, SamplingParams, StopRule, WorkerRole

pytestmark = pytest.mark.ucx

TOKEN = "token of the pull tests"
BLOCK = 8
ANSWER_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Worker:
    """A process and the connection to it."""

    run: WorkerRun
    front_end: RawFrontEnd

    def source(self, tokens: int) -> PrefixSource:
        assert self.front_end.welcome is not None
        return PrefixSource(peer=self.front_end.welcome.peer, tokens=tokens)


@dataclass
class Cluster:
    """Two context workers and a generation worker."""

    a: Worker
    b: Worker
    generation: Worker
    model: ReferenceModel

    async def turn(
        self, name: str, prompt: list[int], context: Worker, source: Worker | None = None
    ) -> list[int]:
        """Ask, judge; the answer."""
        assert context.front_end.welcome is not None
        common = {
            "request_id": name,
            "tokens": pack_ints(prompt),
            "scope": b"tiny",
            "sampling": GREEDY,
            "stop": StopRule(max_tokens=ANSWER_TOKENS),
            "deadline_ms": 60_000,
        }
        context.front_end.send(
            Prefill.model_validate(
                {
                    **common,
                    "destination": self.generation.run.address.incarnation,
                    "prefix_source": None if source is None else source.source(len(prompt)),
                }
            )
        )
        self.generation.front_end.send(
            Generate.model_validate({**common, "source": context.front_end.welcome.peer})
        )
        ended = await context.front_end.end_of(name)
        assert ended.outcome == "succeeded", ended
        ended = await self.generation.front_end.end_of(name)
        assert ended.outcome == "succeeded", ended
        output = self.generation.front_end.choices[name, 0].output()
        assert len(output) == ANSWER_TOKENS
        report = check_equal(self.model, prompt, output, GREEDY)
        assert report.ok, report
        return output


def random_tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, count).tolist()
    return tokens


@pytest.fixture
async def cluster(tiny_models: TinyModels, tmp_path: Path) -> AsyncIterator[Cluster]:
    model, _ = tiny_models("gemma3_text")
    roles: tuple[tuple[str, WorkerRole], ...] = (
        ("a", "context"),
        ("b", "context"),
        ("generation", "generation"),
    )
    configs = [
        WorkerConfig(
            incarnation=Incarnation.mint(name),
            role=role,
            model_path=str(model),
            model_name="tiny",
            cluster_token=TOKEN,
            tokens_per_block=BLOCK,
            kv_cache_bytes=1_000_000,
            max_batch_tokens=32,
            least_pull_tokens=BLOCK,
        )
        for name, role in roles
    ]
    runs = start_workers(configs, tmp_path)
    try:
        async with AsyncExitStack() as stack:
            workers = [Worker(run, await RawFrontEnd.connect(run.address, TOKEN)) for run in runs]
            for worker in workers:
                stack.push_async_callback(worker.front_end.close)
            a, b, generation = workers
            yield Cluster(a, b, generation, ReferenceModel(model))
    finally:
        for run in runs:
            run.process.kill()
            run.process.wait(20)


async def test_a_conversation_moves_between_context_workers(cluster: Cluster) -> None:
    a, b, generation = cluster.a, cluster.b, cluster.generation
    prompt = random_tokens(100, 1)
    answer = await cluster.turn("first", prompt, a)

    # The next turn runs on B, which fetches the first prompt from A.
    prompt = [*prompt, *answer, *random_tokens(30, 2)]
    answer = await cluster.turn("second", prompt, b, a)
    assert b.front_end.started["second"].cached_tokens == 96
    gauges = await b.front_end.idle()
    assert (gauges.pulls_succeeded_total, gauges.pulled_tokens_total) == (1, 96)
    assert (await a.front_end.idle()).pulls_served_total == 1

    # The third on A, which lacks the second prompt and both answers: the generation worker has all.
    held = len(prompt) + ANSWER_TOKENS - 1
    prompt = [*prompt, *answer, *random_tokens(9, 3)]
    await cluster.turn("third", prompt, a, generation)
    cached = held // BLOCK * BLOCK
    assert a.front_end.started["third"].cached_tokens == cached
    gauges = await a.front_end.idle()
    assert (gauges.pulls_succeeded_total, gauges.pulled_tokens_total) == (1, cached - 96)
    assert gauges.prefill_tokens_total == 100 + len(prompt) - cached

    # What nobody holds is declined; a source that is gone costs a failed connection.
    await cluster.turn("fresh", random_tokens(60, 4), b, a)
    a.run.process.kill()
    a.run.process.wait(20)
    await cluster.turn("dead", random_tokens(60, 5), b, a)
    gauges = await b.front_end.idle()
    assert gauges.pulls_succeeded_total == gauges.pulls_declined_total == 1
    assert gauges.pulls_failed_total == 1
    assert gauges.quarantined_blocks == 0
    await generation.front_end.idle()
