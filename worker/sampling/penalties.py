"""What changes logits before temperature, in this order (that of vLLM):

bias added, banned tokens to -inf, repetition penalty (tokens of prompt and output: positive logits
divided, negative ones multiplied), frequency penalty (times the count in the output), presence
penalty (once per token that occurs in the output).

What is to change is worked out on the host as cells of a matrix; changing them is the device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.ports import Draw

Array = npt.NDArray[Any]


def changes_of(rows: Sequence[Draw]) -> list[Array]:
    """What :func:`processed` takes: row, token (int64) and value (float32) of the cells of each of
    the four kinds; a ban has no value.
    """
    bias = [
        ([token for token, _ in p.logit_bias], [value for _, value in p.logit_bias])
        for p in (row.params for row in rows)
    ]
    banned = [(row.banned, np.zeros(len(row.banned))) for row in rows]
    cells = [_cells(bias), _cells(banned)[:2], _cells(map(_repeated, rows))]
    return [array for kind in (*cells, _cells(map(_counted, rows))) for array in kind]


def processed(logits: torch.Tensor, changes: Sequence[torch.Tensor]) -> torch.Tensor:
    """New float32 logits ``[rows, vocab]`` with the changes made; the argument stays."""
    result = logits.clone()
    for_bias, bans, repeated, counted = changes[:3], changes[3:5], changes[5:8], changes[8:]
    rows, tokens, values = for_bias
    result.index_put_((rows, tokens), values, accumulate=True)
    minus_infinity = torch.full((), float("-inf"), device=result.device)
    result.index_put_(tuple(bans), minus_infinity)
    rows, tokens, values = repeated
    old = result[rows, tokens]
    result.index_put_((rows, tokens), torch.where(old > 0, old / values, old * values))
    rows, tokens, values = counted
    result.index_put_((rows, tokens), result[rows, tokens] - values)
    return result


def _repeated(row: Draw) -> tuple[Any, Any]:
    penalty = row.params.repetition_penalty
    if penalty == 1.0:
        return (), ()
    seen = np.unique(np.concatenate((row.prompt_tokens, row.output_tokens)))
    return seen, np.full(len(seen), penalty)


def _counted(row: Draw) -> tuple[Any, Any]:
    params = row.params
    if not (params.frequency_penalty or params.presence_penalty):
        return (), ()
    tokens, counts = np.unique(row.output_tokens, return_counts=True)
    return tokens, params.frequency_penalty * counts + params.presence_penalty


def _cells(by_row: Iterable[tuple[Any, Any]]) -> list[Array]:
    pairs = [(np.asarray(t, np.int64), np.asarray(v, np.float64)) for t, v in by_row]
    numbers = np.repeat(np.arange(len(pairs)), [len(tokens) for tokens, _ in pairs])
    tokens = np.concatenate([tokens for tokens, _ in pairs])
    with np.errstate(over="ignore"):  # what overflows shows in the largest logit
        values = np.concatenate([values for _, values in pairs]).astype(np.float32)
    return [numbers, tokens, values]
