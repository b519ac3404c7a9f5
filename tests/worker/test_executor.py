"""What a step leaves behind: pages that a transfer may read at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import cast

import numpy as np
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.devices import DEVICES, usable
from tests.support.rank_threads import on_ranks
from tests.worker.model.harness import PagedModel
from worker.executor import ModelExecutor
from worker.messages import SamplingParams
from worker.model.feed import TokenFeed
from worker.model.loader import load_model
from worker.model.rank_sum import OnlyRank, RankSum
from worker.model.runner import ModelRunner, SequenceSlice
from worker.ports import Draw, LaunchedStep, Slice, StepRows

LOADING = Lock()
"""transformers loads in one thread of a process at a time."""
TinyModel = Callable[[str], Path]
LATE_CYCLES = 50_000_000
"""Some 25 ms of a GPU."""
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "plain": SamplingParams(temperature=1.2, seed=5),
    "filtered": SamplingParams(temperature=2.0, seed=6, top_k=60, top_p=0.97, logprobs=0),
    "biased": SamplingParams(temperature=0.9, seed=7, logit_bias=((3, 2.0),)),
}
STOPS = (257, 40, 41, 42)
NOTHING = np.zeros(0, dtype=np.int32)
DRAW = Draw(SamplingParams(), 0, 0, NOTHING, NOTHING, ())


class LateRunner:
    """Writes its pages late and draws from equal logits."""

    def __init__(self) -> None:
        self.pages = torch.zeros(1 << 20, device="cuda")
        self.feed = TokenFeed(8, torch.device("cuda", 0))

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        self.pages.fill_(1)
        return torch.zeros((sum(part.wants_logits for part in slices), 8), device="cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_goes_on_from_what_the_one_before_it_draws(
    tiny_model: TinyModel, device: str
) -> None:
    """With all that can be asked of a draw but what looks back."""
    paged = PagedModel(tiny_model("llama"), device=usable(device))
    outputs = {depth: generated(paged, depth) for depth in (1, 2)}
    assert outputs[1] == outputs[2]
    assert len({tuple(tokens) for tokens in outputs[1].values()}) == len(PARAMS)


def generated(paged: PagedModel, depth: int) -> dict[str, list[tuple[int, float | None]]]:
    """Tokens and log-probabilities; at depth 2 every step is launched before the last is seen."""
    executor = ModelExecutor(paged.runner, paged.loaded.device, depth)
    assert executor.depth == depth
    names = [f"{name}{depth}" for name in PARAMS]
    tokens: dict[str, list[int]] = {name: [3, 1, 4, 1, 5] for name in names}
    found: dict[str, list[tuple[int, float | None]]] = {name: [] for name in PARAMS}
    under_way: list[LaunchedStep] = []
    for step in range(8):
        slices = []
        for number, (name, params) in enumerate(zip(names, PARAMS.values(), strict=True)):
            piece = paged.slice(name, tokens[name] if step == 0 else [0])
            fed = number if step and depth == 2 else None
            if step and depth == 1:
                piece.tokens[:] = tokens[name][-1]
            draws = (Draw(params, 0, step, NOTHING, NOTHING, STOPS if step < 3 else ()),)
            slices.append(
                Slice(number, piece.tokens, piece.start, piece.block_tables, draws, feed=fed)
            )
        under_way.append(executor.launch(slices))
        while len(under_way) >= depth or (step == 7 and under_way):
            for name, result in zip(PARAMS, under_way.pop(0).wait(), strict=True):
                assert isinstance(result, tuple)
                (drawn,) = result
                tokens[f"{name}{depth}"].append(drawn.token)
                logprob = None if drawn.logprob is None else round(drawn.logprob.logprob, 4)
                found[name].append((drawn.token, logprob))
    return found


def test_followers_go_on_from_what_the_leader_draws(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")

    def run(ranks: RankSum) -> list[int]:
        with LOADING:
            loaded = load_model(path, ranks=ranks)
        plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)
        storage = TorchStorage(plan, [4] * len(plan.pool_groups))
        executor = ModelExecutor(ModelRunner(loaded, plan, storage), torch.device("cpu"), 2)
        tables = tuple(np.arange(2, dtype=np.int32) for _ in plan.layer_groups)
        prompt = np.array([3, 1, 4, 1, 5], dtype=np.int32)
        params = SamplingParams(temperature=1.2, seed=5)
        under_way: list[LaunchedStep] = []
        for step in range(5):
            draws = (Draw(params, 0, step, NOTHING, NOTHING),)
            part = Slice(0, prompt, 0, tables, draws)
            if step:
                part = Slice(0, np.zeros(1, dtype=np.int32), 4 + step, tables, draws, feed=0)
            if ranks.shard.rank:
                executor.begin([part], [True], StepRows((), ()))()
            else:
                under_way.append(executor.launch([part]))
        results = [result for step in under_way for result in step.wait()]
        return [one.token for result in results if isinstance(result, tuple) for one in result]

    alone = run(OnlyRank())
    together = on_ranks(2, run)
    assert len(set(alone)) > 1
    assert together == [alone, []]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("draws", [(), (DRAW,)], ids=["a chunk", "a last chunk"])
def test_pages_are_final_on_the_device_when_a_step_returns(
    draws: tuple[Draw, ...], depth: int
) -> None:
    """Staging and UCX read them on streams that are ordered behind no other."""
    usable("cuda")
    runner = LateRunner()
    executor = ModelExecutor(cast(ModelRunner, runner), torch.device("cuda", 0), depth)
    executor.execute([Slice(0, np.zeros(4, dtype=np.int32), 0, (), draws)])
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        assert bool((runner.pages == 1).all())
