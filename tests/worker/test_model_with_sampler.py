"""Model and sampler together against the replay oracle, and the oracle against mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.devices import DEVICES, usable
from tests.support.models import FAMILIES
from tests.support.oracle import ReferenceModel, check_equal, check_logprobs
from tests.worker.model.harness import PagedModel
from worker.messages import SamplingParams
from worker.ports import Draw
from worker.sampling import Sampled, sample
from worker.token_runs import TokenLogprob

TinyModel = Callable[[str], Path]

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "plain": SamplingParams(temperature=1.2, seed=5, logprobs=0),
    "filtered": SamplingParams(temperature=2.0, seed=6, top_k=60, top_p=0.97, min_p=0.001),
    "penalised": SamplingParams(
        temperature=0.9,
        seed=7,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((3, 2.0),),
    ),
}
STOPS = (257, 40, 41, 42)
MIN_TOKENS = 10


class Generation:
    """Decodes all of ``PARAMS`` together in one batch, as an engine would."""

    def __init__(self, paged: PagedModel, prompts: dict[str, list[int]], length: int) -> None:
        self.prompts = prompts
        self.output: dict[str, list[int]] = {name: [] for name in prompts}
        self.logprobs: dict[str, list[TokenLogprob | None]] = {name: [] for name in prompts}
        pending: dict[str, Sequence[int]] = dict(prompts)
        for _ in range(length):
            logits = paged.feed(**pending).to(paged.loaded.device)
            rows = [self._row(name) for name in pending]
            for name, result in zip(pending, sample(logits, rows), strict=True):
                assert isinstance(result, Sampled)
                self.output[name].append(result.token)
                self.logprobs[name].append(result.logprob)
            pending = {name: self.output[name][-1:] for name in pending}

    def _row(self, name: str) -> Draw:
        output = self.output[name]
        return Draw(
            params=PARAMS[name],
            choice=1,
            output_index=len(output),
            prompt_tokens=np.array(self.prompts[name], np.int32),
            output_tokens=np.array(output, np.int32),
            banned=STOPS if len(output) < MIN_TOKENS else (),
        )


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    random = np.random.default_rng(1)
    return {
        name: [int(t) for t in random.integers(0, 256, 5 + 13 * i)] for i, name in enumerate(PARAMS)
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_the_oracle(
    tiny_model: TinyModel, prompts: dict[str, list[int]], family: str, device: str
) -> None:
    paged = PagedModel(tiny_model(family), device=usable(device))
    reference = ReferenceModel(tiny_model(family))
    generation = Generation(paged, prompts, 60)
    for name, params in PARAMS.items():
        output = generation.output[name]
        report = check_equal(
            reference,
            prompts[name],
            output,
            params,
            choice=1,
            banned_until=(MIN_TOKENS, STOPS),
        )
        assert report.ok, report
        assert report.positions == 60
        assert not set(output[:MIN_TOKENS]) & set(STOPS)
        if params.logprobs is not None:
            logprobs = [entry for entry in generation.logprobs[name] if entry is not None]
            assert check_logprobs(reference, prompts[name], output, logprobs) == []


class TestOracleSees:
    """Each kind of mistake is reported with its position."""

    @pytest.fixture(scope="class")
    def reference(self, tiny_model: TinyModel) -> ReferenceModel:
        return ReferenceModel(tiny_model("llama"))

    @pytest.fixture(scope="class", params=["greedy", "plain", "filtered", "penalised"])
    def params(self, request: pytest.FixtureRequest) -> SamplingParams:
        return PARAMS[request.param]

    @pytest.fixture(scope="class")
    def output(self, reference: ReferenceModel, params: SamplingParams) -> list[int]:
        return reference.generate([1, 2, 3], params, 30)

    def check(self, reference: ReferenceModel, output: list[int], params: SamplingParams) -> Any:
        return check_equal(reference, [1, 2, 3], output, params)

    def test_nothing_wrong(
        self, reference: ReferenceModel, params: SamplingParams, output: list[int]
    ) -> None:
        report = self.check(reference, output, params)
        assert report.ok
        assert report.exact == 30
        assert report.worst_gap == 0

    @pytest.mark.parametrize("position", [0, 17, 29])
    def test_a_wrong_token(
        self,
        reference: ReferenceModel,
        params: SamplingParams,
        output: list[int],
        position: int,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        wrong = list(output)
        wrong[position] = (wrong[position] + 1) % 256
        report = self.check(reference, wrong, params)
        assert not report.ok
        assert report.differences[0].index == position
        assert report.differences[0].emitted == wrong[position]
        assert f"output {position}" in capsys.readouterr().out

    def test_another_seed_or_choice(
        self, reference: ReferenceModel, params: SamplingParams, output: list[int]
    ) -> None:
        greedy = params.temperature == 0
        other = params.model_copy(update={"seed": 99})
        assert self.check(reference, output, other).ok == greedy
        assert check_equal(reference, [1, 2, 3], output, params, choice=1).ok == greedy

    def test_a_dropped_token(
        self, reference: ReferenceModel, params: SamplingParams, output: list[int]
    ) -> None:
        assert not self.check(reference, output[:10] + output[11:], params).ok

    def test_nothing_emitted(self, reference: ReferenceModel) -> None:
        report = self.check(reference, [], PARAMS["greedy"])
        assert not report.ok
        assert "nothing to judge" in str(report)

    def test_wrong_logprobs(self, reference: ReferenceModel) -> None:
        output = reference.generate([1, 2, 3], PARAMS["greedy"], 3)
        entries = [TokenLogprob(logprob=-1.0, top=((0, -2.0),))] * 3
        wrong = check_logprobs(reference, [1, 2, 3], output, entries)
        assert any("expected" in line for line in wrong)
        assert any("alternatives" in line for line in wrong)
        assert check_logprobs(reference, [1, 2, 3], output, entries[:2]) == [
            "expected 3 log-probabilities, got 2"
        ]
