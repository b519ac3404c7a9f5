"""Instances of one and of two ranks, which share all of every layer (tp2) or MLPs alone (dp2), real
processes over UCX and gloo: every pair of context and generation worker gives what the oracle does,
and no rank outlives another.
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
from worker.messages import Cancel, PrefixSource, SamplingParams, WorkerRole

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(180)]

LENGTHS = (1, BLOCK, 2 * BLOCK + 1, 100)
GONE_S = 5.0


SIZES = {"one": (1, 1), "tp2": (2, 1), "dp2": (2, 2)}
"""Ranks and dp groups."""


def ranks_of(
    role: WorkerRole, model: Path, kind: str, devices: tuple[str, ...]
) -> list[WorkerConfig]:
    """Configurations of all ranks of a new instance. Two that share attention have two steps under
    way.
    """
    leader = config(role, model)
    size, dp_size = SIZES[kind]
    return [
        leader.model_copy(
            update={
                "tensor_parallel_size": size,
                "attention_dp_size": dp_size,
                "rank": rank,
                "device": devices[rank],
                "least_pull_tokens": BLOCK,
                "steps_under_way": size // dp_size,
            }
        )
        for rank in range(size)
    ]


@dataclass(frozen=True)
class Instances:
    """Leader and followers of each, by role and kind."""

    runs: dict[tuple[str, str], list[WorkerRun]]
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
    keys = [(role, kind) for role in roles for kind in ("one", "tp2")]
    keys.append(("aggregated", "dp2"))
    configs = [(key, one) for key in keys for one in ranks_of(key[0], path, key[1], devices)]
    runs: dict[tuple[str, str], list[WorkerRun]] = {}
    started = start_workers([one for _, one in configs], logs)
    for (key, _), run in zip(configs, started, strict=True):
        runs.setdefault(key, []).append(run)
    # Every worker runs every message: one instance is either end.
    runs["context", "dp2"] = runs["generation", "dp2"] = runs.pop(("aggregated", "dp2"))
    yield Instances(runs, ReferenceModel(path))
    codes = {key: [run.stop() for run in ranks] for key, ranks in runs.items()}
    alone = [code for (_, kind), found in codes.items() for code in found if kind == "one"]
    assert alone == [0, 0], [log.read_text() for log in logs.iterdir()]


PAIRS = [
    *[(context, generation) for context in ("one", "tp2") for generation in ("one", "tp2")],
    ("one", "dp2"),
    ("dp2", "one"),
    ("dp2", "tp2"),
]


@pytest.mark.parametrize(("context_kind", "generation_kind"), PAIRS)
async def test_every_pair_is_equal_to_the_oracle(
    instances: Instances, context_kind: str, generation_kind: str
) -> None:
    context_run = instances.runs["context", context_kind][0]
    generation_run = instances.runs["generation", generation_kind][0]
    context = await RawFrontEnd.connect(context_run.address, TOKEN)
    generation = await RawFrontEnd.connect(generation_run.address, TOKEN)
    before = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    pair = f"{context_kind}-{generation_kind}"
    for params, label in ((GREEDY, "greedy"), (DRAWN, "drawn")):
        names = {f"{label}-{pair}-{length}": prompt_of(length, 7) for length in LENGTHS}
        for name, prompt in names.items():
            context.send(prefill(name, prompt, params, generation_run.address.incarnation, n=2))
            await send_generate(generation, name, prompt, params, context, n=2)
        for name, prompt in names.items():
            sent, received = await context.end_of(name), await generation.end_of(name)
            assert sent.outcome == received.outcome == "succeeded", (sent, received)
            assert received.prefill_tokens <= 2  # nothing but what follows the prompt
            judge(instances.model, generation, name, prompt, params, n=2)
    if context_kind == "dp2":
        assert set(context.placed.values()) == {0, 1}
    after = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    assert after == before
    await context.close()
    await generation.close()


async def send_generate(
    generation: RawFrontEnd,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    context: RawFrontEnd,
    *,
    n: int,
    max_tokens: int = 12,
) -> None:
    """From the rank that has the prompt, once that is known."""
    message = generate(name, prompt, params, context, n=n, max_tokens=max_tokens)
    assert context.welcome is not None
    if context.welcome.dp_size > 1:
        await context.until(lambda: name in context.placed)
        source = context.welcome.peer.ranks[context.placed[name]]
        message = message.model_copy(update={"source": source})
    generation.send(message)


async def test_a_prefix_is_pulled_by_all_ranks_from_all_ranks(instances: Instances) -> None:
    """Both ends have two ranks; the source is the generation worker, which holds the answer too."""
    puller = await RawFrontEnd.connect(instances.runs["context", "tp2"][0].address, TOKEN)
    source = await RawFrontEnd.connect(instances.runs["generation", "tp2"][0].address, TOKEN)
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


async def test_a_dp_instance_computes_prompts_of_its_own(instances: Instances) -> None:
    """Several at once, of unlike lengths, on both ranks; then each again, which finds its prefix on
    the rank that has it. The pools hold all of them.
    """
    front_end = await RawFrontEnd.connect(instances.runs["generation", "dp2"][0].address, TOKEN)
    before = (await front_end.idle()).free_blocks
    prompts = {f"alone-{count}": prompt_of(16 + 25 * count, 11) for count in range(4)}
    for name, prompt in prompts.items():
        front_end.send(generate(name, prompt, DRAWN, n=2))
    for name, prompt in prompts.items():
        assert (await front_end.end_of(name)).outcome == "succeeded"
        judge(instances.model, front_end, name, prompt, DRAWN, n=2)
    for name, prompt in prompts.items():
        again = f"{name}-again"
        await front_end.idle()
        front_end.send(generate(again, prompt, DRAWN, n=2))
        assert (await front_end.end_of(again)).outcome == "succeeded"
        judge(instances.model, front_end, again, prompt, DRAWN, n=2)
        full = (len(prompt) - 1) // BLOCK * BLOCK
        assert front_end.started[name].cached_tokens == 0
        assert front_end.started[again].cached_tokens >= full
    assert (await front_end.idle()).free_blocks == before
    await front_end.close()


@pytest.mark.parametrize(
    ("context_kind", "generation_kind"), [("tp2", "tp2"), ("one", "dp2"), ("dp2", "one")]
)
async def test_cancelled_requests_leave_nothing_behind_on_any_rank(
    instances: Instances, context_kind: str, generation_kind: str
) -> None:
    context = await RawFrontEnd.connect(instances.runs["context", context_kind][0].address, TOKEN)
    generation_run = instances.runs["generation", generation_kind][0]
    generation = await RawFrontEnd.connect(generation_run.address, TOKEN)
    before = (await context.idle()).free_blocks, (await generation.idle()).free_blocks
    names = [f"cancelled-{context_kind}-{generation_kind}-{count}" for count in range(6)]
    for count, name in enumerate(names):
        prompt = prompt_of(100, 20 + count)
        context.send(prefill(name, prompt, GREEDY, generation_run.address.incarnation))
        await send_generate(generation, name, prompt, GREEDY, context, n=1, max_tokens=50)
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


@pytest.mark.parametrize(
    ("role", "kind", "killed"),
    [("generation", "tp2", 1), ("context", "tp2", 0), ("generation", "dp2", 1)],
)
async def test_one_ranks_death_is_the_end_of_all(
    instances: Instances, role: WorkerRole, kind: str, killed: int
) -> None:
    """While it computes, so that the other one waits in a sum or is about to."""
    ranks = instances.runs[role, kind]
    front_end = await RawFrontEnd.connect(ranks[0].address, TOKEN)
    front_end.send(generate("endless", prompt_of(8), GREEDY, max_tokens=200))
    await front_end.until(lambda: ("endless", 0) in front_end.choices)
    os.kill(ranks[killed].address.pid, signal.SIGKILL)
    other = ranks[1 - killed]
    assert other.process.wait(GONE_S) == 1
    await front_end.until(lambda: front_end.gone)
    await front_end.close()
