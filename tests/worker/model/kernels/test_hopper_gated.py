"""The gated product for capability 9.0: against torch on such a device; elsewhere that it compiles
for one, and which products it is given.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch.nn.functional import linear, silu

from tests.worker.model.kernels.hopper import MOST_SHARED_BYTES, compiled, hopper_device
from worker.model.kernel_layers import KernelProduct
from worker.model.kernels import hopper_gated
from worker.model.products import RowNorm

BRAIN, HALF = torch.bfloat16, torch.float16
EPS: Final = 1e-5


def some(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("num_rows", [1, 33, 63, 64])
@pytest.mark.parametrize("num_in", [256, 320, 1024])
def test_it_equals_torch(dtype: torch.dtype, num_rows: int, num_in: int) -> None:
    device = hopper_device()
    rows = some(num_rows, num_in, dtype=dtype, device=device, seed=0)
    weight = some(2 * 384, num_in, dtype=dtype, device=device, seed=1) / num_in**0.5
    assert hopper_gated.takes(rows, weight)
    found = hopper_gated.gated_rows(rows, weight)
    gate, up = linear(rows.float(), weight.float()).chunk(2, 1)
    expected = silu(gate) * up
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_rows_beyond_the_batch_are_not_written() -> None:
    device = hopper_device()
    memory = torch.full((64, 384), 7.0, dtype=BRAIN, device=device)
    rows = some(40, 256, dtype=BRAIN, device=device, seed=0)
    weight = some(2 * 384, 256, dtype=BRAIN, device=device, seed=1)
    rows.new_empty = lambda *_: memory[:40]  # type: ignore[method-assign,assignment]
    found = hopper_gated.gated_rows(rows, weight)
    assert found.data_ptr() == memory.data_ptr()
    assert (memory[40:] == 7.0).all()
    assert not (found == 7.0).all(1).any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [32, 33, 64, 65])
def test_a_layer_gets_the_same_from_every_way(num_rows: int) -> None:
    """Below, within and above the numbers of rows that it takes."""
    device = hopper_device()
    rows = some(num_rows, 512, dtype=BRAIN, device=device, seed=0)
    weight = some(2 * 512, 512, dtype=BRAIN, device=device, seed=1) / 512**0.5
    norm = RowNorm(some(512, dtype=BRAIN, device=device, seed=2), EPS)
    found = KernelProduct(weight, None).gated(rows, norm, silu)
    gate, up = linear(norm(rows).float(), weight.float()).chunk(2, 1)
    torch.testing.assert_close(found.float(), silu(gate) * up, atol=3e-2, rtol=3e-2)


def test_what_it_does_not_take() -> None:
    """No row of another device, kind, width or number."""
    rows, weight = torch.zeros(64, 256, dtype=BRAIN), torch.zeros(512, 256, dtype=BRAIN)
    assert not hopper_gated.takes(rows, weight)  # a CPU
    taking = pytest.MonkeyPatch()
    with taking.context() as patched:
        patched.setattr(hopper_gated, "is_hopper", lambda device: True)
        assert hopper_gated.takes(rows, weight)
        assert not hopper_gated.takes(torch.zeros(65, 256, dtype=BRAIN), weight)
        assert not hopper_gated.takes(rows[:0], weight)
        assert not hopper_gated.takes(rows.float(), weight.float())
        assert not hopper_gated.takes(rows.half(), weight)
        assert not hopper_gated.takes(rows, weight[:510])
        assert not hopper_gated.takes(rows[:, :192], weight[:, :192].contiguous())
        assert not hopper_gated.takes(torch.zeros(64, 300, dtype=BRAIN)[:, 1:257], weight)


def test_it_compiles_where_there_is_no_such_device() -> None:
    found = compiled(
        "hopper_gated.hopper_gated_rows",
        constants={"ROWS": 64, "COLUMNS": 128, "INPUTS": 64, "STAGES": 4, "AHEAD": True},
        boxes={"weight": (128, 64), "rows": (64, 64)},
        pointers={"out": "*bf16"},
    )
    assert 0 < found.shared_bytes <= MOST_SHARED_BYTES
    # Gate and up, each 64 inputs of 16 a product; two boxes of the matrix and one of the rows, in
    # the first tiles and in the loop.
    assert found.text.count("wgmma.mma_async") == 2 * 64 // 16
    assert found.text.count("cp.async.bulk.tensor") == 3 * hopper_gated.STAGES + 3
    assert "griddepcontrol.wait" in found.text
