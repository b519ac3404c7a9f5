"""Real worker processes with a tiny model, driven by raw messages: aggregated, and a pair over
UCX.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.devices import usable
from tests.support.oracle import TOLERANCE, ReferenceModel, check_equal, check_logprobs
from tests.support.raw_front_end import RawFrontEnd, WorkerRun, start_workers
from tests.support.rounded_kv import with_tensors
from transfer.identity import Incarnation
from transfer.wire import pack_ints
from worker.config import KVElementType, WorkerConfig
from worker.messages import (
    Cancel,
    Generate,
    Ping,
    Prefill,
    SamplingParams,
    StopRule,
    TransferPair,
    Warm,
    WorkerRole,
)

pytestmark = pytest.mark.ucx

TOKEN = "test token"
BLOCK = 8
SLOTS_BYTES = 1_000_000
LAYERS = 3
LAYER_BLOCK_NUMBERS = 2 * 2 * 16 * BLOCK
"""Keys and values, heads, head size: of the tiny models."""
SCALES = torch.tensor([0.015, 0.02])
"""Of float8 keys and values, in every layer: in the checkpoint."""
FLIP = 2e-2
"""A number between two float8 ones may be rounded to either after another order of sums."""


@dataclass(frozen=True)
class Pair:
    """One context and one generation worker."""

    context: WorkerRun
    generation: WorkerRun
    model: ReferenceModel
    path: Path
    device: str
    kv_dtype: KVElementType

    @property
    def tolerance(self) -> float:
        return FLIP if self.kv_dtype == "fp8" else TOLERANCE

    @property
    def layer_block_bytes(self) -> int:
        return LAYER_BLOCK_NUMBERS * (1 if self.kv_dtype == "fp8" else 4)


@dataclass(frozen=True)
class Single:
    """One worker that does everything itself."""

    run: WorkerRun
    model: ReferenceModel


def config(
    role: WorkerRole, model: Path, device: str = "cpu", kv_dtype: KVElementType = "auto"
) -> WorkerConfig:
    return WorkerConfig(
        incarnation=Incarnation.mint(role),
        role=role,
        model_path=str(model),
        model_name="tiny",
        device=device,
        dtype="float32",
        kv_cache_dtype=kv_dtype,
        cluster_token=TOKEN,
        tokens_per_block=BLOCK,
        kv_cache_bytes=SLOTS_BYTES,
        max_batch_tokens=32,
        max_running=8,
    )


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "cpu", "auto"),
        ("gemma3_text", "cpu", "fp8"),
        pytest.param(("llama", "cuda", "auto"), marks=pytest.mark.gpu),
        pytest.param(("gemma3_text", "cuda", "fp8"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def pair(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    family, device, kv_dtype = request.param
    logs = tmp_path_factory.mktemp("pair")
    path, scales = tiny_model(family), None
    if kv_dtype == "fp8":
        path = with_tensors(path, tmp_path_factory.mktemp("scaled") / family, scale_tensors())
        scales = SCALES[:, None].expand(LAYERS, 2, 2)
    roles: tuple[WorkerRole, ...] = ("context", "generation")
    configs = [config(role, path, usable(device), kv_dtype) for role in roles]
    context, generation = start_workers(configs, logs)
    model = ReferenceModel(path, kv_scales=scales)
    yield Pair(context, generation, model, path, device, kv_dtype)
    codes = [context.stop(), generation.stop()]
    assert codes == [0, 0], [log.read_text() for log in logs.iterdir()]


def scale_tensors() -> dict[str, torch.Tensor]:
    """By ModelOpt's names."""
    name = "model.layers.{}.self_attn.{}_proj.{}_scale"
    return {
        name.format(layer, kind, kind): scale.clone()
        for layer in range(LAYERS)
        for kind, scale in zip("kv", SCALES, strict=True)
    }


@pytest.fixture(scope="module")
def single(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Single]:
    path = tiny_model("llama")
    logs = tmp_path_factory.mktemp("single")
    # The one that is started as an operator starts it.
    (run,) = start_workers([config("aggregated", path)], logs, afresh=True)
    yield Single(run, ReferenceModel(path))
    assert run.stop() == 0, [log.read_text() for log in logs.iterdir()]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(length + 1000 * seed).integers(0, 256, length)
    tokens: list[int] = drawn.tolist()
    return tokens


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=7, logprobs=1)


def generate(
    name: str,
    prompt: list[int],
    params: SamplingParams,
    front_end: RawFrontEnd | None = None,
    *,
    n: int = 1,
    max_tokens: int = 12,
) -> Generate:
    source = None
    if front_end is not None:
        assert front_end.welcome is not None
        source = front_end.welcome.peer
    return Generate(
        request_id=name,
        tokens=pack_ints(prompt),
        scope=b"tiny",
        sampling=params,
        stop=StopRule(max_tokens=max_tokens),
        n=n,
        source=source,
        deadline_ms=60_000,
    )


def prefill(
    name: str,
    prompt: list[int],
    params: SamplingParams,
    destination: Incarnation | None,
    *,
    n: int = 1,
    max_tokens: int = 12,
) -> Prefill:
    return Prefill(
        request_id=name,
        tokens=pack_ints(prompt),
        scope=b"tiny",
        sampling=params,
        stop=StopRule(max_tokens=max_tokens),
        n=n,
        destination=destination,
        deadline_ms=60_000,
    )


def judge(
    model: ReferenceModel,
    front_end: RawFrontEnd,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    *,
    n: int = 1,
    max_tokens: int = 12,
    tolerance: float = TOLERANCE,
) -> None:
    for choice in range(n):
        heard = front_end.choices[name, choice]
        output = heard.output()
        assert len(output) == max_tokens
        assert heard.finish == "length"
        report = check_equal(model, prompt, output, params, choice=choice, tolerance=tolerance)
        assert report.ok, report
        bound = 2 * tolerance
        assert check_logprobs(model, prompt, output, heard.logprobs, tolerance=bound) == []


LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 100, 200)


async def test_aggregated_output_is_equal_to_the_oracle(single: Single) -> None:
    front_end = await RawFrontEnd.connect(single.run.address, TOKEN)
    before = await front_end.idle()
    for params, label in ((GREEDY, "greedy"), (DRAWN, "drawn")):
        for temperature in ("cold", "warm"):
            for length in LENGTHS:
                name = f"{label}-{temperature}-{length}"
                front_end.send(generate(name, prompt_of(length), params))
            for length in LENGTHS:
                name = f"{label}-{temperature}-{length}"
                assert (await front_end.end_of(name)).outcome == "succeeded"
                judge(single.model, front_end, name, prompt_of(length), params)
    after = await front_end.idle()
    assert after.free_blocks == before.free_blocks
    await front_end.close()


async def pairs_of(end: RawFrontEnd) -> tuple[TransferPair, ...]:
    """Once there are some, and all are connected."""

    def connected() -> bool:
        pairs = end.gauges.pairs if end.gauges is not None else ()
        return bool(pairs) and all(pair.lane for pair in pairs)

    await end.until(connected)
    assert end.gauges is not None
    return end.gauges.pairs


async def test_a_pair_is_connected_ahead_of_requests_and_both_ends_tell(pair: Pair) -> None:
    context = await RawFrontEnd.connect(pair.context.address, TOKEN)
    generation = await RawFrontEnd.connect(pair.generation.address, TOKEN)
    assert context.welcome is not None
    generation.send(Warm(peers=(context.welcome.peer,)))
    for end, side, peer in (
        (generation, "generation", pair.context),
        (context, "context", pair.generation),
    ):
        (told,) = await pairs_of(end)
        assert (told.side, told.peer, told.reason) == (side, peer.address.incarnation, "")
        assert told.lane == ("shm" if pair.device == "cpu" else "cuda_ipc")
    await context.close()
    await generation.close()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_pair_is_equal_to_the_oracle(pair: Pair, n: int) -> None:
    context = await RawFrontEnd.connect(pair.context.address, TOKEN)
    generation = await RawFrontEnd.connect(pair.generation.address, TOKEN)
    destination = pair.generation.address.incarnation
    for params, label in ((GREEDY, "greedy"), (DRAWN, "drawn")):
        names = {f"{label}-{n}-{length}": prompt_of(length, n) for length in LENGTHS}
        for name, prompt in names.items():
            context.send(prefill(name, prompt, params, destination, n=n))
            generation.send(generate(name, prompt, params, context, n=n))
        for name, prompt in names.items():
            sent, received = await context.end_of(name), await generation.end_of(name)
            assert sent.outcome == received.outcome == "succeeded", (sent, received)
            assert received.prefill_tokens <= n
            judge(pair.model, generation, name, prompt, params, n=n, tolerance=pair.tolerance)
            if n == 1:
                await _is_what_the_context_worker_says_alone(context, generation, name, prompt)
            for choice in range(n):
                first = context.choices[name, choice].output()
                assert first == generation.choices[name, choice].output()[:1]
    await context.idle()
    await generation.idle()
    await context.close()
    await generation.close()


async def _is_what_the_context_worker_says_alone(
    context: RawFrontEnd, generation: RawFrontEnd, name: str, prompt: list[int]
) -> None:
    """It has the pages that it sent."""
    params = GREEDY if name.startswith("greedy") else DRAWN
    context.send(generate(f"alone-{name}", prompt, params))
    assert (await context.end_of(f"alone-{name}")).outcome == "succeeded"
    alone, ferried = context.choices[f"alone-{name}", 0], generation.choices[name, 0]
    assert alone.output() == ferried.output()
    ours, theirs = ([one.logprob for one in heard.logprobs] for heard in (ferried, alone))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


async def test_a_warm_pair_ferries_only_what_is_missing(pair: Pair) -> None:
    context = await RawFrontEnd.connect(pair.context.address, TOKEN)
    generation = await RawFrontEnd.connect(pair.generation.address, TOKEN)
    destination = pair.generation.address.incarnation
    prompt = prompt_of(10 * BLOCK, seed=9)
    moved = []
    for name, tokens in (("first", prompt), ("second", [*prompt, *prompt_of(2 * BLOCK, seed=5)])):
        context.send(prefill(name, tokens, GREEDY, destination))
        generation.send(generate(name, tokens, GREEDY, context))
        assert (await generation.end_of(name)).outcome == "succeeded"
        moved.append((await context.end_of(name)).transferred_bytes)
        judge(pair.model, generation, name, tokens, GREEDY, tolerance=pair.tolerance)
    assert moved[1] == 2 * LAYERS * pair.layer_block_bytes < moved[0]
    assert context.started["second"].cached_tokens == 10 * BLOCK
    assert generation.started["second"].cached_tokens >= 10 * BLOCK
    await context.close()
    await generation.close()


async def test_half_of_the_requests_are_cancelled_and_every_page_comes_home(
    pair: Pair,
) -> None:
    context = await RawFrontEnd.connect(pair.context.address, TOKEN)
    generation = await RawFrontEnd.connect(pair.generation.address, TOKEN)
    destination = pair.generation.address.incarnation
    rng = np.random.default_rng(3)
    names = {f"cancel-{index}": prompt_of(40 + index, seed=2) for index in range(40)}

    async def cancel(name: str) -> None:
        await asyncio.sleep(float(rng.uniform(0, 0.4)))
        context.send(Cancel(request_id=name))
        generation.send(Cancel(request_id=name))

    cancels = []
    for index, (name, prompt) in enumerate(names.items()):
        context.send(prefill(name, prompt, GREEDY, destination))
        generation.send(generate(name, prompt, GREEDY, context))
        if index % 2:
            cancels.append(asyncio.create_task(cancel(name)))
    await asyncio.gather(*cancels)
    for index, (name, prompt) in enumerate(names.items()):
        await context.end_of(name)
        ended = await generation.end_of(name)
        if not index % 2:
            assert ended.outcome == "succeeded", ended
            judge(pair.model, generation, name, prompt, GREEDY, tolerance=pair.tolerance)
    for front_end in (context, generation):
        gauges = await front_end.idle()
        assert gauges.quarantined_blocks == 0
        await front_end.close()


async def test_a_front_end_that_hangs_up_cancels_its_requests(single: Single) -> None:
    gone = await RawFrontEnd.connect(single.run.address, TOKEN)
    stays = await RawFrontEnd.connect(single.run.address, TOKEN)
    for index in range(6):
        gone.send(generate(f"gone-{index}", prompt_of(50), GREEDY, max_tokens=300))
    stays.send(generate("stays", prompt_of(33), GREEDY))
    await gone.until(lambda: gone.choices)
    await gone.close()
    assert (await stays.end_of("stays")).outcome == "succeeded"
    judge(single.model, stays, "stays", prompt_of(33), GREEDY)
    await stays.idle()
    await stays.close()


async def test_a_ping_is_answered_while_the_engine_works(single: Single) -> None:
    front_end = await RawFrontEnd.connect(single.run.address, TOKEN)
    front_end.send(generate("busy", prompt_of(150, seed=4), GREEDY, max_tokens=40))
    front_end.send(Ping(sent_ms=17))
    await front_end.until(lambda: front_end.pongs)
    assert front_end.pongs[0].sent_ms == 17
    assert 0 <= front_end.pongs[0].engine_age_ms < 5000
    assert (await front_end.end_of("busy")).outcome == "succeeded"
    await front_end.close()


async def test_a_wrong_cluster_token_is_refused(single: Single) -> None:
    with pytest.raises(AssertionError, match="wrong proof of the cluster token"):
        await RawFrontEnd.connect(single.run.address, "wrong token")


async def test_a_killed_context_worker_fails_its_legs_and_a_repair_completes_them(
    pair: Pair, tmp_path: Path
) -> None:
    own = config("context", pair.path, pair.device, pair.kv_dtype)
    (victim,) = start_workers([own], tmp_path)
    try:
        await _kill_and_repair(victim, pair)
    finally:
        victim.process.kill()
        victim.process.wait()


async def _kill_and_repair(context_run: WorkerRun, pair: Pair) -> None:
    generation_run = pair.generation
    context = await RawFrontEnd.connect(context_run.address, TOKEN)
    generation = await RawFrontEnd.connect(generation_run.address, TOKEN)
    prompts = {f"r{index}": prompt_of(180 + index) for index in range(12)}
    for name, prompt in prompts.items():
        context.send(prefill(name, prompt, GREEDY, generation_run.address.incarnation))
        generation.send(generate(name, prompt, GREEDY, context))
    await context.until(lambda: len(context.choices) >= 2)
    context_run.process.send_signal(signal.SIGKILL)
    outcomes = {name: await generation.end_of(name) for name in prompts}
    failed = [name for name, ended in outcomes.items() if ended.outcome != "succeeded"]
    assert failed, "the kill came too late to try anything"
    assert all(outcomes[name].retryable for name in failed)
    for name in failed:
        generation.ended.pop(name)
        heard = context.choices.get((name, 0))
        emitted = heard.output() if heard is not None else []
        repair = generate(name, prompts[name], GREEDY)
        generation.send(repair.model_copy(update={"emitted": (pack_ints(emitted),)}))
        assert (await generation.end_of(name)).outcome == "succeeded"
        mine = generation.choices[name, 0].tokens
        output = emitted + [mine[index] for index in range(len(emitted), 12)]
        report = check_equal(pair.model, prompts[name], output, GREEDY, tolerance=pair.tolerance)
        assert report.ok, report
    context_run.process.wait(10)
    generation_run.hear_of_death(context_run.address.incarnation)
    # Over CUDA IPC the dead process could have reached pages by itself: now they come home too.
    await generation.idle()
    await _is_refused_as_dead(generation, context)
    await generation.close()
    await context.close()


async def _is_refused_as_dead(generation: RawFrontEnd, dead: RawFrontEnd) -> None:
    """What was said of the other process is known, soon after it was said."""
    for attempt in range(100):
        name = f"late-{attempt}"
        generation.send(generate(name, prompt_of(20), GREEDY, dead))
        ended = await generation.end_of(name)
        assert ended.outcome == "failed"
        if "is dead" in ended.message:
            return
    raise AssertionError("it never heard that the other process is dead")


def test_a_worker_whose_thread_of_transfers_dies_ends_and_says_why(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (run,) = start_workers(
        [config("aggregated", tiny_model("llama"))], tmp_path, "tests.worker.breakable_host"
    )
    try:
        asyncio.run(_break_in_mid_request(run))
        assert run.process.wait(30) == 1
    finally:
        run.process.kill()
        run.process.wait()
    (log,) = tmp_path.iterdir()
    assert "the transport is dead: UCX driver thread died: SystemError" in log.read_text()


async def _break_in_mid_request(run: WorkerRun) -> None:
    front_end = await RawFrontEnd.connect(run.address, TOKEN)
    front_end.send(generate("r", prompt_of(20), GREEDY, max_tokens=400))
    await front_end.until(lambda: ("r", 0) in front_end.choices)
    run.process.send_signal(signal.SIGUSR1)
    ended = await front_end.end_of("r")
    assert (ended.outcome, ended.retryable) == ("failed", True)
