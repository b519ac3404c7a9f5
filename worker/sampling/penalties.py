"""What changes a row of logits before temperature, in this order (that of vLLM):

bias added, banned tokens to -inf, repetition penalty (tokens of prompt and output: positive logits
divided, negative ones multiplied), frequency penalty (times the count in the output), presence
penalty (once per token that occurs in the output).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling.rows import SampleRow


def processed(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """A new row ``[vocab]`` with everything of ``row`` applied; the argument is not changed."""
    params = row.params
    result = logits.clone()
    if params.logit_bias:
        ids = _ids([token for token, _ in params.logit_bias], result)
        bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=result.dtype)
        result.index_add_(0, ids, bias.to(result.device))
    if row.banned:
        result[_ids(row.banned, result)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = _ids(np.unique(np.concatenate((row.prompt_tokens, row.output_tokens))), result)
        old = result[seen]
        penalty = params.repetition_penalty
        result[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(row.output_tokens):
        tokens, counts = np.unique(row.output_tokens, return_counts=True)
        cost = params.frequency_penalty * counts + params.presence_penalty
        taken = torch.from_numpy(cost).to(dtype=result.dtype, device=result.device)
        result[_ids(tokens, result)] -= taken
    return result


def _ids(
    tokens: list[int] | tuple[int, ...] | npt.NDArray[np.int32], like: torch.Tensor
) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens, np.int64)).to(like.device)
