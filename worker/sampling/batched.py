"""Drawing for many rows at once in torch: what a GPU is good at. float64 throughout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.sampling.filters import HEAD, thresholds
from worker.sampling.noise import gumbel_noise, row_keys
from worker.sampling.rows import SampleRow


def draw_rows(scores: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token a row; ``scores`` are processed logits ``[rows, vocab]``, no row is greedy."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    scaled = scores.double() / temperature.to(scores.device).unsqueeze(1)
    keys = row_keys(rows, scores.device)
    tokens = [0] * len(rows)
    plain = [i for i, row in enumerate(rows) if not row.is_filtered]
    cut = [i for i, row in enumerate(rows) if row.is_filtered]
    for indices, draw in ((plain, _draw_plain), (cut, _draw_filtered)):
        if indices:
            chosen = [rows[i] for i in indices]
            for i, token in zip(
                indices, draw(scaled[indices], keys[:, indices], chosen), strict=True
            ):
                tokens[i] = token
    return tokens


def _draw_plain(scaled: torch.Tensor, keys: torch.Tensor, _rows: Sequence[SampleRow]) -> list[int]:
    vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    noise = gumbel_noise(keys, vocabulary.unsqueeze(0))
    return noise.add_(scaled).argmax(dim=1).tolist()


def _draw_filtered(
    scaled: torch.Tensor, keys: torch.Tensor, rows: Sequence[SampleRow]
) -> list[int]:
    params = [row.params for row in rows]
    size = min(scaled.shape[1], max(HEAD, *(p.top_k + 1 for p in params)))
    head, ids = scaled.topk(size, dim=1)
    log_mass = scaled.logsumexp(1, keepdim=True)
    limits = thresholds(head, log_mass, params)
    tokens = best_kept(head, ids, limits.lowest, keys)
    if size < scaled.shape[1]:
        uncertain = limits.certain.logical_not().squeeze(1).nonzero().squeeze(1).tolist()
        for i in uncertain:
            one, key = scaled[i : i + 1], keys[:, i : i + 1]
            whole, order = one.sort(dim=1, descending=True)
            lowest = thresholds(whole, log_mass[i : i + 1], [params[i]]).lowest
            (tokens[i],) = best_kept(whole, order, lowest, key)
    return tokens


def best_kept(
    values: torch.Tensor, ids: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor
) -> list[int]:
    """Token of the largest noisy value among those that reach ``lowest``."""
    noisy = gumbel_noise(keys, ids.int()).add_(values)
    best = noisy.masked_fill_(values < lowest, float("-inf")).argmax(dim=1, keepdim=True)
    return ids.gather(1, best).squeeze(1).tolist()
