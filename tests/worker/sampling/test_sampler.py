"""The sampler against its naive twin, its independence of the batch, and its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import naive_sampling as naive
from tests.support.devices import DEVICES, usable
from worker.messages import SamplingParams
from worker.ports import Draw
from worker.sampling import Sampled, SampleResult, SamplingFailed, queue_draws, sample
from worker.sampling.noise import gumbel_noise, high_bits, key_rows, row_keys
from worker.upload import upload


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def make_row(
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    choice: int = 0,
    **params: Any,
) -> Draw:
    return Draw(
        params=SamplingParams(**params),
        choice=choice,
        output_index=len(output),
        prompt_tokens=np.array(prompt, np.int32),
        output_tokens=np.array(output, np.int32),
        banned=banned,
    )


def naive_row(row: Draw) -> naive.NaiveRow:
    return naive.NaiveRow(
        row.params, row.choice, row.output_index, row.prompt_tokens, row.output_tokens, row.banned
    )


def tokens(logits: torch.Tensor, rows: Sequence[Draw]) -> list[int]:
    found = sample(logits, rows)
    assert all(isinstance(result, Sampled) for result in found)
    return [result.token for result in found if isinstance(result, Sampled)]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def assert_alike(found: Sequence[SampleResult], expected: Sequence[SampleResult]) -> None:
    """Equal tokens and failures, and log-probabilities to the last bits of float32."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, SamplingFailed) or isinstance(other, SamplingFailed):
            assert one == other
            continue
        assert one.token == other.token
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is None or other.logprob is None:
            continue
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
        assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
        values = [value for _, value in other.logprob.top]
        assert [value for _, value in one.logprob.top] == pytest.approx(values, abs=1e-5)


ids = st.integers(0, 59)
row_strategy = st.builds(
    make_row,
    prompt=st.lists(ids, max_size=8),
    output=st.lists(ids, max_size=8),
    banned=st.lists(ids, max_size=3, unique=True).map(tuple),
    choice=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 59, 200]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(ids, st.sampled_from([-100.0, 3.0])), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, 0, 4]),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_every_row_equals_its_naive_twin(rows: list[Draw], seed: int) -> None:
    logits = random_logits(len(rows), 60, seed)
    before = logits.clone()
    expected = [
        naive.draw(logits[i].double().numpy(), naive_row(row)) for i, row in enumerate(rows)
    ]
    assert tokens(logits, rows) == expected
    assert torch.equal(logits, before)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_both_ways_of_drawing_agree(rows: list[Draw], seed: int) -> None:
    """What a GPU computes for all rows and what a CPU computes row by row, both on CPU."""
    logits = random_logits(len(rows), 3000, seed, spread=4.0)
    before = logits.clone()
    queued = queue_draws(logits, rows)
    assert torch.equal(logits, before)
    found = queued.results()
    assert_alike(found, sample(logits, rows))
    assert queued.tokens.tolist() == [one.token for one in found if isinstance(one, Sampled)]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row_strategy, min_size=2, max_size=8), seed=st.integers(0, 1000))
def test_a_row_is_independent_of_its_batch(rows: list[Draw], seed: int) -> None:
    logits = random_logits(len(rows), 60, seed)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [r.token for r in together if isinstance(r, Sampled)] == [
        r.token for r in alone if isinstance(r, Sampled)
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1e-6, "top_p": 0.5},
        {"top_k": 2000, "top_p": 0.99, "min_p": 1e-9},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_large_vocabulary_equals_naive(device: str, params: dict[str, Any], spread: float) -> None:
    """Heads smaller than what is kept: flat distributions keep thousands of tokens."""
    logits = random_logits(6, 20_000, 3, spread)
    rows = [make_row(output=range(i), seed=11, **params) for i in range(6)]
    expected = [
        naive.draw(logits[i].double().numpy(), naive_row(row)) for i, row in enumerate(rows)
    ]
    assert tokens(logits.to(device), rows) == expected
    assert queue_draws(logits.to(device), rows).tokens.tolist() == expected


def test_ties_at_a_boundary_are_all_kept() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = 1.0
    for params in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.3}):
        drawn = {
            tokens(logits, [make_row(output=[0] * i, seed=5, temperature=1.0, **params)])[0]
            for i in range(300)
        }
        assert drawn == set(range(10))
        rows = [make_row(output=[0] * i, seed=5, temperature=1.0, **params) for i in range(300)]
        assert set(queue_draws(logits.expand(300, -1), rows).tokens.tolist()) == drawn


def test_noise_is_the_published_hash(device: str) -> None:
    rows = [
        make_row(output=[1] * i, choice=c, seed=s) for i, c, s in [(0, 0, 0), (7, 2, 2**63 - 1)]
    ]
    keys = row_keys(rows, torch.device(device))
    found = (
        gumbel_noise(keys, torch.arange(5000, dtype=torch.int32, device=device)[None]).cpu().numpy()
    )
    for row, noise in zip(rows, found, strict=True):
        expected = naive.gumbel(row.params.seed, row.choice, row.output_index, 5000)
        np.testing.assert_allclose(noise, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
def test_noise_is_the_same_on_a_gpu() -> None:
    """The hash bit for bit; the two logarithms after it to a few units in the last place, so that
    a draw never depends on where it was made.
    """
    device = torch.device(usable("cuda"))
    rows = [make_row(output=[1] * i, choice=i % 3, seed=2**63 - 1 - i) for i in range(64)]
    vocabulary = torch.arange(50_000, dtype=torch.int32)[None]
    found, expected = (
        (high_bits(keys, ids), gumbel_noise(keys, ids))
        for keys, ids in (
            (row_keys(rows, device), vocabulary.to(device)),
            (row_keys(rows, torch.device("cpu")), vocabulary),
        )
    )
    assert torch.equal(found[0].cpu(), expected[0])
    noise = found[1].cpu()
    print(f"{(noise != expected[1]).double().mean():.1e} of the noise differs in its last bits")
    torch.testing.assert_close(noise, expected[1], rtol=1e-14, atol=1e-15)
    assert torch.equal(noise.argmax(1), expected[1].argmax(1))


def test_keys_of_many_rows_are_those_of_each() -> None:
    rows = [
        make_row(output=[1] * i, choice=i % 3, seed=seed)
        for i, seed in enumerate((0, 1, 2**63 - 1, 0x9E3779B97F4A7C15 >> 1))
    ]
    expected = row_keys(rows, torch.device("cpu"))[:, :, 0].numpy()
    assert np.array_equal(key_rows(rows), expected)


@pytest.mark.gpu
def test_uploads_are_kept_until_they_are_copied() -> None:
    """Two in a row before anybody waits (their arrays may go at once)."""
    device = torch.device(usable("cuda"))
    arrays: list[Any] = [
        np.arange(5, dtype=np.int64) + (1 << 40),
        np.ones((2, 3)),
        np.zeros(0, np.int32),
    ]
    sent = [upload([array + i for array in arrays], device) for i in range(2)]
    for i, tensors in enumerate(sent):
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array + i)


def test_noise_is_gumbel() -> None:
    """Mean and variance of the standard Gumbel distribution, per token and per position."""
    rows = [make_row(output=[0] * i, seed=9) for i in range(400)]
    noise = gumbel_noise(
        row_keys(rows, torch.device("cpu")), torch.arange(500, dtype=torch.int32)[None]
    )
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    assert abs(noise.mean(0) - 0.5772).max() < 0.35
    assert abs(torch.corrcoef(noise[:60])).fill_diagonal_(0).max() < 0.25


def test_distribution_is_the_softmax() -> None:
    """Chi-square over 6 tokens and 6000 draws of different seeds, choices and positions."""
    logits = torch.tensor([0.5, 0.0, -1.0, 2.0, 1.0, -0.5])
    rows = [
        make_row(output=[0] * (i % 20), choice=i % 3, seed=i, temperature=0.8) for i in range(6000)
    ]
    found = tokens(logits.expand(len(rows), -1), rows)
    counts = np.bincount(found, minlength=6)
    expected = len(rows) * torch.softmax(logits / 0.8, 0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 99.9 % quantile, 5 degrees


def test_choices_and_positions_differ() -> None:
    logits = torch.zeros(1, 1000)
    drawn = {
        tokens(logits, [make_row(output=[0] * i, choice=c, seed=4)])[0]
        for i in range(8)
        for c in range(8)
    }
    assert len(drawn) > 55


class TestLogprobs:
    """Of the raw distribution, whatever the row does to it."""

    def test_own_and_alternatives(self, device: str) -> None:
        logits = random_logits(4, 50, 1)
        rows = [
            make_row(temperature=0.0, logprobs=3),
            make_row(temperature=0.7, seed=1, logprobs=0, banned=(4,), top_k=5),
            make_row(temperature=0.0),
            make_row(temperature=0.0, logprobs=60, logit_bias=((7, 100.0),)),
        ]
        found = sample(logits.to(device), rows)
        expected = torch.log_softmax(logits, 1)
        for i, count in ((0, 3), (1, 0), (3, 50)):
            result = found[i]
            assert isinstance(result, Sampled)
            assert result.logprob is not None
            assert result.logprob.logprob == pytest.approx(
                float(expected[i, result.token]), abs=1e-5
            )
            assert len(result.logprob.top) == count
            best = expected[i].sort(descending=True)
            assert [token for token, _ in result.logprob.top] == best.indices[:count].tolist()
            np.testing.assert_allclose(
                [value for _, value in result.logprob.top], best.values[:count], atol=1e-5
            )
        assert found[2] == Sampled(int(logits[2].argmax()), None)
        assert isinstance(found[3], Sampled)
        assert found[3].token == 7


class TestFailures:
    """A bad row fails alone and says why."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "logprobs": 2}])
    def test_bad_logits(self, value: float, params: dict[str, Any]) -> None:
        logits = random_logits(3, 40)
        logits[1, 17] = value
        found = sample(logits, [make_row(**params)] * 3)
        queued = queue_draws(logits, [make_row(**params)] * 3)
        assert_alike(queued.results(), found)
        assert 0 <= int(queued.tokens[1]) < 40
        assert isinstance(found[1], SamplingFailed)
        assert "expected finite logits" in found[1].reason
        assert isinstance(found[0], Sampled)
        assert isinstance(found[2], Sampled)

    def test_masked_tokens_are_fine(self) -> None:
        logits = random_logits(1, 40)
        logits[0, 3:] = float("-inf")
        assert all(tokens(logits, [make_row(seed=i)])[0] < 3 for i in range(20))

    def test_nothing_left(self) -> None:
        everything = tuple(range(40))
        rows = [make_row(banned=everything, temperature=0.0), make_row(banned=everything)]
        logits = random_logits(2, 40)
        for result in (*sample(logits, rows), *queue_draws(logits, rows).results()):
            assert result == SamplingFailed("every token is banned")

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "params",
        [
            {"repetition_penalty": 1e-300},
            {"presence_penalty": -1e300},
            {"logit_bias": ((0, float("inf")),)},
        ],
    )
    def test_overflow_is_not_called_a_ban(self, temperature: float, params: dict[str, Any]) -> None:
        row = make_row(output=range(40), temperature=temperature, **params)
        (result,) = sample(random_logits(1, 40), [row])
        assert queue_draws(random_logits(1, 40), [row]).results() == [result]
        assert isinstance(result, SamplingFailed)
        assert "overflow" in result.reason
        assert "banned" not in result.reason

    def test_overflow_beside_bans_is_named(self) -> None:
        row = make_row(output=[0, 1], banned=tuple(range(2, 40)), presence_penalty=1e300)
        (result,) = sample(random_logits(1, 40), [row])
        assert isinstance(result, SamplingFailed)
        assert "overflow" in result.reason

    def test_all_minus_infinity(self) -> None:
        (result,) = sample(torch.full((1, 5), float("-inf")), [make_row()])
        assert isinstance(result, SamplingFailed)

    def test_shapes_are_checked(self) -> None:
        with pytest.raises(ValueError, match=r"expected float32 logits \[1, vocab\]"):
            sample(torch.zeros(2, 5), [make_row()])
        with pytest.raises(ValueError, match="float64"):
            sample(torch.zeros(1, 5, dtype=torch.float64), [make_row()])
        assert sample(torch.zeros(0, 5), []) == []
