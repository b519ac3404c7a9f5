"""Instances of one and of two ranks, real processes over UCX and gloo: every pair of context and
generation worker gives what the oracle does, and no rank outlives another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.devices import usable_for
from tests.support.oracle import ReferenceModel
from tests.support.raw_front_end import RawFrontEnd, WorkerRun, start_workers
from tests.worker.test_host import (
    BLOCK,
    DRAWN,
    GREEDY,
    TOKEN,
    config,
    generate,
    judge,
    prefill,
    prompt_of,
)
from worker.config import WorkerConfig
from worker.messages import Cancel, PrefixSource, WorkerRole

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(180)]

LENGTHS = (1, BLOCK, 2 * BLOCK + 1, 100)
GONE_S = 5.0


def ranks_of(
    role: WorkerRole, model: Path, size: int, devices: tuple[str, ...]
) -> list[WorkerConfig]:
    """Configurations of all ranks of a new instance. Those of two have two steps under way."""
    leader = config(role, model)
    return [
        leader.model_copy(
            update={
                "tensor_parallel_size": size,
                "rank": rank,
                "device": devices[rank],
                "least_pull_tokens": BLOCK,
                "steps_under_way": size,
            }
        )
        for rank in range(size)
    ]


@dataclass(frozen=True)
class Instances:
    """Leader and followers of each, by role and size."""

    runs: dict[tuple[str, int], list[WorkerRun]]
    model: ReferenceModel


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2", "cpu"),
        pytest.param(("qwen2", "cuda"), marks=pytest.mark.multi_gpu),
        pytest.param(("qwen3_moe", "cpu"), marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", "cuda"), marks=[pytest.mark.slow, pytest.mark.multi_gpu]),
    ],
    ids="-".join,
)
def instances(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Instances]:
    family, device = request.param
    devices = usable_for(device, 2)
    path = tiny_model(family)
    logs = tmp_path_factory.mktemp("ranks")
    roles: tuple[WorkerRole, ...] = ("context", "generation")
    configs = [
        one for role in roles for size in (1, 2) for one in ranks_of(role, path, size, devices)
    ]
    runs: dict[tuple[str, int], list[WorkerRun]] = {}
    for one, run in zip(configs, start_workers(configs, logs), strict=True):
        runs.setdefault((one.role, one.tensor_parallel_size), []).append(run)
    yield Instances(runs, ReferenceModel(path))
    codes = {key: [run.stop() for run in ranks] for key, ranks in runs.items()}
    alone = [code for (_, size), found in codes.items() for code in found if size == 1]
    assert alone == [0, 0], [log.read_text() for log in logs.iterdir()]


@pytest.mark.parametrize("generation_size", [1, 2])
@pytest.mark.parametrize("context_size", [1, 2])
async def test_every_pair_is_equal_to_the_oracle(
    instances: Instances, context_size: int, generation_size: int
) -> None:
    context_run = instances.runs["context", context_size][0]
    generation_run = instances.runs["generation", generation_size][0]
    context = await RawFrontEnd.connect(context_run.address, TOKEN)
    generation = await RawFrontEnd.connect(generation_run.address, TOKEN)
    before = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    pair = f"{context_size}-{generation_size}"
    for params, label in ((GREEDY, "greedy"), (DRAWN, "drawn")):
        names = {f"{label}-{pair}-{length}": prompt_of(length, 7) for length in LENGTHS}
        for name, prompt in names.items():
            context.send(prefill(name, prompt, params, generation_run.address.incarnation, n=2))
            generation.send(generate(name, prompt, params, context, n=2))
        for name, prompt in names.items():
            sent, received = await context.end_of(name), await generation.end_of(name)
            assert sent.outcome == received.outcome == "succeeded", (sent, received)
            assert received.prefill_tokens <= 2  # nothing but what follows the prompt
            judge(instances.model, generation, name, prompt, params, n=2)
    after = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    assert after == before
    await context.close()
    await generation.close()


async def test_a_prefix_is_pulled_by_all_ranks_from_all_ranks(instances: Instances) -> None:
    """Both ends have two ranks; the source is the generation worker, which holds the answer too."""
    puller = await RawFrontEnd.connect(instances.runs["context", 2][0].address, TOKEN)
    source = await RawFrontEnd.connect(instances.runs["generation", 2][0].address, TOKEN)
    assert source.welcome is not None
    prompt = prompt_of(12 * BLOCK + 1, 9)
    source.send(generate("held", prompt, GREEDY))
    assert (await source.end_of("held")).outcome == "succeeded"
    asked = prefill("pulled", prompt, GREEDY, None, max_tokens=1).model_copy(
        update={"prefix_source": PrefixSource(peer=source.welcome.peer, tokens=12 * BLOCK)}
    )
    puller.send(asked)
    ended = await puller.end_of("pulled")
    assert ended.outcome == "succeeded"
    assert puller.started["pulled"].cached_tokens == 12 * BLOCK
    judge(instances.model, puller, "pulled", prompt, GREEDY, max_tokens=1)
    await puller.close()
    await source.close()


async def test_cancelled_requests_leave_nothing_behind_on_any_rank(instances: Instances) -> None:
    context = await RawFrontEnd.connect(instances.runs["context", 2][0].address, TOKEN)
    generation_run = instances.runs["generation", 2][0]
    generation = await RawFrontEnd.connect(generation_run.address, TOKEN)
    before = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    names = [f"cancelled-{count}" for count in range(6)]
    for count, name in enumerate(names):
        prompt = prompt_of(100, 20 + count)
        context.send(prefill(name, prompt, GREEDY, generation_run.address.incarnation))
        generation.send(generate(name, prompt, GREEDY, context, max_tokens=50))
        ends = ((context, generation), (context,), (generation,))[count % 3]
        if ends == (generation,):  # before the grant nobody would tell the context worker
            await context.until(partial(context.started.get, name))
        for end in ends:
            end.send(Cancel(request_id=name))
    for name in names:
        outcomes = {(await end.end_of(name)).outcome for end in (context, generation)}
        assert outcomes & {"cancelled", "failed"}
    after = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    assert after == before
    await context.close()
    await generation.close()


@pytest.mark.parametrize(("role", "killed"), [("generation", 1), ("context", 0)])
async def test_one_ranks_death_is_the_end_of_all(
    instances: Instances, role: WorkerRole, killed: int
) -> None:
    """While it computes, so that the other one waits in a sum or is about to."""
    ranks = instances.runs[role, 2]
    front_end = await RawFrontEnd.connect(ranks[0].address, TOKEN)
    front_end.send(generate("endless", prompt_of(8), GREEDY, max_tokens=200))
    await front_end.until(lambda: ("endless", 0) in front_end.choices)
    os.kill(ranks[killed].address.pid, signal.SIGKILL)
    other = ranks[1 - killed]
    assert other.process.wait(GONE_S) == 1
    await front_end.until(lambda: front_end.gone)
    await front_end.close()
