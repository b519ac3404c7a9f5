"""The replay oracle: is an emitted sequence what the model would have said?

Comparing two runs token by token ends at the first harmless difference: the order of reductions
moves logits by 1e-4, and one flipped near-tie changes everything after it. So the whole emitted
sequence is run through one float32 forward of transformers' own model with its own attention, and
every position is judged: the emitted token's score (processed logits; plus temperature times its
counter-based noise when drawn) must lie within a tolerance of the best, and at least 99 % of the
positions must have exactly the best. Nothing ends early; the rest are counted and printed.

    report = check_equal(model, prompt, output, params)
    assert report.ok, report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from tests.support import naive_sampling as naive
from tests.support.rounded_kv import round_kv
from worker.config import ElementType
from worker.messages import SamplingParams
from worker.model.families import KNOWN_FAMILIES
from worker.model.loader import load_model
from worker.token_runs import TokenLogprob

TOLERANCE: Final = 1e-3
POSITIONS_PER_DIFFERENCE: Final = 100
"""One inexact position is allowed for each full hundred, and one in a shorter sequence."""
LOGPROB_TOLERANCE: Final = 2e-3


def load_reference(path: Path | str, device: str = "cpu", weights: ElementType = "float32") -> Any:
    """transformers' own model with its own attention, computing in float32 with weights rounded to
    ``weights``.

    Weights of a GGUF file come through our reader, which a test holds equal to transformers' (that
    takes ten times as long).
    """
    loaded = load_model(path, device=device, dtype=weights)
    module = loaded.module.float()
    # What torch's attention does not have, softcaps and sinks, transformers may leave out silently.
    fast = loaded.facts.family in KNOWN_FAMILIES
    module.set_attn_implementation("sdpa" if fast else "eager")
    return module


_Key = tuple[tuple[int, ...], tuple[int, ...]]


class ReferenceModel:
    """transformers' float32 model with its own attention, and the last sequence's logits."""

    def __init__(
        self,
        path: Path | str,
        device: str = "cpu",
        weights: ElementType = "float32",
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """``kv_scales`` ``[layers, 2, num_kv_heads]``: keys and values are rounded by them as
        float8 pages round.
        """
        self._device = device
        self._module: Any = load_reference(path, device, weights)
        if kv_scales is not None:
            round_kv(self._module, kv_scales.to(device))
        self._last: tuple[_Key, npt.NDArray[np.float32]] | None = None

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> npt.NDArray[np.float32]:
        """``[len(output) + 1, vocab]`` of one forward over the whole sequence: row i is what output
        i is drawn from, the last row what would come next.
        """
        key = (tuple(int(token) for token in prompt), tuple(int(token) for token in output))
        if self._last is None or self._last[0] != key:
            with torch.inference_mode():
                ids = torch.tensor([[*key[0], *key[1]]], device=self._device)
                found = self._module(
                    input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1
                ).logits[0]
            self._last = (key, found.float().cpu().numpy())
        return self._last[1]

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, length: int, choice: int = 0
    ) -> list[int]:
        """What the model says, one whole forward a token: for short texts only."""
        output: list[int] = []
        for index in range(length):
            row = _row(params, choice, index, prompt, output, ())
            scores = self.logits(prompt, output)[-1].astype(np.float64)
            output.append(naive.draw(scores, row))
        return output


@dataclass(frozen=True)
class Difference:
    """A position whose emitted token is not the best one."""

    index: int
    emitted: int
    best: int
    gap: float
    """Score of the best minus that of the emitted token, in logits; infinite if filtered out."""

    @override
    def __str__(self) -> str:
        return f"output {self.index}: emitted {self.emitted}, best {self.best}, gap {self.gap:.2e}"


@dataclass(frozen=True)
class OracleReport:
    """The verdict on one choice of one request."""

    positions: int
    differences: tuple[Difference, ...]
    tolerance: float
    problems: tuple[str, ...] = field(default=())
    """What is wrong beside the scores, such as an empty output."""

    @property
    def exact(self) -> int:
        """Positions with exactly the best token."""
        return self.positions - len(self.differences)

    @property
    def worst_gap(self) -> float:
        """The largest gap; 0 when every token is the best."""
        return max((difference.gap for difference in self.differences), default=0.0)

    @property
    def ok(self) -> bool:
        """Every gap within tolerance, 99 % exact, nothing else wrong."""
        allowed = max(1, self.positions // POSITIONS_PER_DIFFERENCE)
        few = len(self.differences) <= allowed
        return not self.problems and self.worst_gap <= self.tolerance and few

    @override
    def __str__(self) -> str:
        verdict = "equal to the oracle" if self.ok else "NOT equal to the oracle"
        lines = [
            f"{verdict}: {self.exact} of {self.positions} positions exact, worst gap "
            f"{self.worst_gap:.2e} (tolerance {self.tolerance:.0e})",
            *self.problems,
            *(str(difference) for difference in self.differences),
        ]
        return "\n  ".join(lines)


def check_equal(
    model: ReferenceModel,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    banned_until: tuple[int, tuple[int, ...]] = (0, ()),
    tolerance: float = TOLERANCE,
) -> OracleReport:
    """Judge every output token of one choice.

    ``banned_until`` is (min_tokens, stop token ids): these ids are not drawn before that many
    output tokens. Differences are printed, so that they show even when the report is ok.
    """
    prompt, output = [int(t) for t in prompt], [int(t) for t in output]
    if not prompt or not output:
        return OracleReport(
            0, (), tolerance, (f"nothing to judge: {len(prompt)} + {len(output)} tokens",)
        )
    logits = model.logits(prompt, output)[:-1].astype(np.float64)
    problems = [] if np.isfinite(logits).all() else ["the reference's logits are not finite"]
    minimum, stops = banned_until
    differences = []
    for index, token in enumerate(output):
        banned = stops if index < minimum else ()
        row = _row(params, choice, index, prompt, output[:index], banned)
        difference = _judge(logits[index], row, token, tolerance)
        if difference is not None:
            differences.append(difference)
    report = OracleReport(len(output), tuple(differences), tolerance, tuple(problems))
    if differences:
        print(report)
    return report


def _judge(
    logits: npt.NDArray[np.float64], row: naive.NaiveRow, token: int, tolerance: float
) -> Difference | None:
    """None when the token is exactly the best. A filter's boundary gets the same tolerance."""
    scores = naive.processed(logits, row)
    target = naive.noisy(scores, row)
    if row.greedy:
        best = int(np.argmax(target))
        gap = float(target[best] - target[token])
    else:
        exactly = np.where(naive.kept(scores, row.params), target, -np.inf)
        best = int(np.argmax(exactly))
        surely = np.where(naive.kept(scores, row.params, -tolerance), target, -np.inf)
        possible = bool(naive.kept(scores, row.params, tolerance)[token])
        gap = max(0.0, float(surely.max() - target[token])) if possible else float("inf")
    return None if token == best else Difference(row.output_index, token, best, gap)


def check_logprobs(
    model: ReferenceModel,
    prompt: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    *,
    tolerance: float = LOGPROB_TOLERANCE,
) -> list[str]:
    """Compare reported log-probabilities with the reference's raw ones; returns what is wrong.

    Alternatives are compared by value: near-ties may come in another order.
    """
    if len(logprobs) != len(output):
        return [f"expected {len(output)} log-probabilities, got {len(logprobs)}"]
    rows = torch.from_numpy(model.logits(prompt, output)[:-1].copy())
    expected = torch.log_softmax(rows.double(), dim=1).numpy()
    wrong: list[str] = []
    for index, (token, entry) in enumerate(zip(output, logprobs, strict=True)):
        reported = [(int(token), entry.logprob), *entry.top]
        for name, value in reported:
            if abs(value - expected[index, name]) > tolerance:
                wrong.append(
                    f"output {index}: log-probability of {name} is {value:.5f}, "
                    f"expected {expected[index, name]:.5f}"
                )
        best = np.sort(expected[index])[::-1][: len(entry.top)]
        found = np.array([value for _, value in entry.top])
        if len(found) and np.abs(found - best).max() > tolerance:
            wrong.append(f"output {index}: the alternatives are not the most likely tokens")
    return wrong


def _row(
    params: SamplingParams,
    choice: int,
    index: int,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: tuple[int, ...],
) -> naive.NaiveRow:
    return naive.NaiveRow(
        params=params,
        choice=choice,
        output_index=index,
        prompt_tokens=np.array(prompt, np.int32),
        output_tokens=np.array(output, np.int32),
        banned=banned,
    )
