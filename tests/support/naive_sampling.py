"""The naive twin of ``worker.sampling``: one row, numpy, float64, written from the definitions.

Shares no code with the sampler, so that a test comparing the two, and the replay oracle, see the
sampler's mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.messages import SamplingParams

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class NaiveRow:
    """The same facts as a sampler's row."""

    params: SamplingParams
    choice: int
    output_index: int
    prompt_tokens: Ints
    output_tokens: Ints
    banned: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.params.temperature < 1e-5


def processed(logits: Floats, row: NaiveRow) -> Floats:
    """Bias, bans and penalties, token by token."""
    params = row.params
    result = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        result[token] += bias
    for token in row.banned:
        result[token] = -np.inf
    for token in {*row.prompt_tokens.tolist(), *row.output_tokens.tolist()}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in row.output_tokens.tolist():
        result[token] -= params.frequency_penalty
    for token in set(row.output_tokens.tolist()):
        result[token] -= params.presence_penalty
    return result


def kept(scores: Floats, params: SamplingParams, slack: float = 0.0) -> npt.NDArray[np.bool_]:
    """Which tokens the filters keep; ``scores`` are processed logits before temperature.

    ``slack`` moves every boundary, in logits: positive keeps tokens that a logit error of that size
    could let in, negative drops those that it could push out.
    """
    x = scores / params.temperature
    slack = slack / params.temperature
    keep = np.isfinite(x)
    if params.min_p > 0:
        keep &= x >= x.max() + np.log(params.min_p) - slack
    if params.top_k > 0:
        kth = np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
        keep &= x >= kth - slack
    if params.top_p < 1.0:
        order = [i for i in np.argsort(-x, kind="stable") if keep[i]]
        weights = np.exp(x[order] - x[order[0]])
        share = weights / weights.sum()
        before = np.cumsum(share) - share
        last = max(int(np.count_nonzero(before < params.top_p + slack)) - 1, 0)
        keep &= x >= x[order[last]] - slack
    keep[int(np.argmax(x))] = True
    return keep


def gumbel(seed: int, choice: int, output_index: int, vocab: int) -> Floats:
    """The noise from its definition, in wrapping uint32 and Python integers."""
    key = 0
    for word in (seed, choice, output_index):
        key = _mix64(key + word)
    tokens = np.arange(vocab, dtype=np.uint32)
    high = _mix32(tokens * np.uint32(0x9E3779B1) + np.uint32(key & 0xFFFFFFFF), _FIRST)
    high = _mix32(high ^ np.uint32(key >> 32), _SECOND)
    low = _mix32(high ^ np.uint32(_mix64(key) & 0xFFFFFFFF), _FIRST) >> np.uint32(12)
    uniform = (high.astype(np.float64) * 2.0**20 + low + 0.5) / 2.0**52
    return np.asarray(-np.log(-np.log(uniform)))


_FIRST = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
_SECOND = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)


def _mix32(x: npt.NDArray[np.uint32], how: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    first, factor, second, other, third = map(np.uint32, how)
    x = (x ^ (x >> first)) * factor
    x = (x ^ (x >> second)) * other
    return x ^ (x >> third)


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def noisy(scores: Floats, row: NaiveRow) -> Floats:
    """Processed logits plus noise, in logits: what a draw maximises over the kept tokens."""
    if row.greedy:
        return scores
    noise = gumbel(row.params.seed, row.choice, row.output_index, len(scores))
    return scores + row.params.temperature * noise


def draw(logits: Floats, row: NaiveRow) -> int:
    """The token a row draws."""
    scores = processed(logits, row)
    target = noisy(scores, row)
    if not row.greedy:
        target = np.where(kept(scores, row.params), target, -np.inf)
    return int(np.argmax(target))
