"""What a step leaves behind: pages that a transfer may read at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch

from tests.support.devices import usable
from worker.executor import ModelExecutor
from worker.messages import SamplingParams
from worker.model.runner import ModelRunner, SequenceSlice
from worker.ports import Draw, Slice

LATE_CYCLES = 50_000_000
"""Some 25 ms of a GPU."""
NOTHING = np.zeros(0, dtype=np.int32)
DRAW = Draw(SamplingParams(), 0, 0, NOTHING, NOTHING, ())


class LateRunner:
    """Writes its pages late and draws from equal logits."""

    def __init__(self) -> None:
        self.pages = torch.zeros(1 << 20, device="cuda")

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        self.pages.fill_(1)
        return torch.zeros((sum(part.wants_logits for part in slices), 8), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("draws", [(), (DRAW,)], ids=["a chunk", "a last chunk"])
def test_pages_are_final_on_the_device_when_a_step_returns(draws: tuple[Draw, ...]) -> None:
    """Staging and UCX read them on streams that are ordered behind no other."""
    usable("cuda")
    runner = LateRunner()
    executor = ModelExecutor(cast(ModelRunner, runner), torch.device("cuda", 0))
    executor.execute([Slice(0, np.zeros(4, dtype=np.int32), 0, (), draws)])
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        assert bool((runner.pages == 1).all())
