"""The weights of one rank, read from safetensors files without the parts of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from worker.model.shard import ShardPlan


def read_safetensors(files: Sequence[Path], plan: ShardPlan) -> dict[str, torch.Tensor]:
    """This rank's part of every tensor, by name, contiguous, on CPU in the files' types.

    What lies in one piece stays where it is, a view of the mapped file; of what does not the part
    alone is copied. So other ranks' parts take no memory.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                whole = file.get_slice(name)
                index = plan.part(name, tuple(whole.get_shape()))
                values = whole[index].contiguous() if index else file.get_tensor(name)
                weights[name] = values if plan.owns(name) else torch.zeros_like(values)
    return weights
