"""Drawing one token for each row of a batch, now.

Greedy rows cost one argmax. Others are drawn one by one on a CPU, where only the head of the
distribution is worth looking at, and all together elsewhere. What a row draws depends on its logits
and its :class:`Draw` alone, never on the rows beside it.

Log-probabilities are of the model's own distribution: before bias, penalties, temperature and
filters, as vLLM and OpenAI report them. A row without a finite largest logit fails alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from worker.ports import Draw
from worker.sampling.penalties import changes_of, processed
from worker.sampling.queued import queue_draws
from worker.sampling.rows import (
    Sampled,
    SampleResult,
    SamplingFailed,
    reason_of,
    reason_of_changed,
)
from worker.sampling.rowwise import draw_row
from worker.token_runs import TokenLogprob


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Draw]) -> list[SampleResult]:
    """Draw one token a row.

    ``logits`` is float32 ``[rows, vocab]`` on any device and is not changed.

    Raises:
        ValueError: ``logits`` does not have one float32 row for each of ``rows``.
    """
    if logits.ndim != 2 or len(logits) != len(rows) or logits.dtype != torch.float32:
        raise ValueError(
            f"expected float32 logits [{len(rows)}, vocab], got {logits.dtype} {list(logits.shape)}"
        )
    if not rows:
        return []
    if logits.device.type != "cpu":
        return queue_draws(logits, rows).results()
    largest, tokens = _row_maxima(logits)
    failed = {i: reason_of(value) for i, value in enumerate(largest) if not math.isfinite(value)}
    sound = [i for i in range(len(rows)) if i not in failed]
    scores = _scores(logits, rows, [i for i in sound if rows[i].changes_logits])
    for i in [i for i in scores if not math.isfinite(scores[i].amax())]:
        failed[i] = _reason_of_scores(logits[i], scores[i], rows[i])
        sound.remove(i)
    changed = [i for i in sound if i in scores and rows[i].is_greedy]
    if changed:
        _, best = _row_maxima(torch.stack([scores[i] for i in changed]))
        _put(tokens, changed, best)
    drawn = [i for i in sound if not rows[i].is_greedy]
    if drawn:
        vocabulary = torch.arange(logits.shape[1], dtype=torch.int32)
        picked = [(scores[i] if i in scores else logits[i], rows[i]) for i in drawn]
        _put(tokens, drawn, [draw_row(score, row, vocabulary) for score, row in picked])
    logprobs = _logprobs(logits, rows, sound, tokens)
    return [
        SamplingFailed(failed[i]) if i in failed else Sampled(token, logprobs.get(i))
        for i, token in enumerate(tokens)
    ]


def _scores(
    logits: torch.Tensor, rows: Sequence[Draw], changed: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Processed logits of the rows that change some."""
    if not changed:
        return {}
    changes = [torch.from_numpy(array) for array in changes_of([rows[i] for i in changed])]
    return dict(zip(changed, processed(logits[list(changed)], changes), strict=True))


def _row_maxima(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Largest value of each row and the first token that has it; NaN where a row holds one."""
    values = logits.numpy()  # numpy's argmax is ten times as fast as torch's here
    best = values.argmax(axis=1)
    return values[np.arange(len(best)), best].tolist(), best.tolist()


def _reason_of_scores(logits: torch.Tensor, scores: torch.Tensor, row: Draw) -> str:
    """Why nothing can be drawn from ``scores``, which ``row`` made of sound ``logits``."""
    allowed = logits.isfinite()
    allowed[torch.tensor(row.banned, dtype=torch.int64)] = False
    if not allowed.any():
        return "every token is banned"
    return reason_of_changed(float(scores.amax()))


def _put(tokens: list[int], indices: Sequence[int], values: Sequence[int]) -> None:
    for i, value in zip(indices, values, strict=True):
        tokens[i] = value


def _logprobs(
    logits: torch.Tensor,
    rows: Sequence[Draw],
    sound: Sequence[int],
    tokens: Sequence[int],
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the rows that want them."""
    wanted = [(i, count) for i in sound if (count := rows[i].params.logprobs) is not None]
    if not wanted:
        return {}
    indices = torch.tensor([i for i, _ in wanted], device=logits.device)
    picked = logits.index_select(0, indices)
    log_mass = picked.logsumexp(1, keepdim=True)
    drawn = torch.tensor([[tokens[i]] for i, _ in wanted], device=logits.device)
    own = (picked.gather(1, drawn) - log_mass).squeeze(1).tolist()
    most = min(max(count for _, count in wanted), logits.shape[1])
    best, ids = picked.topk(most, dim=1)
    values, names = (best - log_mass).tolist(), ids.tolist()
    return {
        i: TokenLogprob(
            logprob=own[k], top=tuple(zip(names[k][:count], values[k][:count], strict=True))
        )
        for k, (i, count) in enumerate(wanted)
    }
