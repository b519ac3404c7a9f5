"""Head norm, rotary embedding and the write to the pages against torch, in poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from worker.model.errors import AttentionInputError
from worker.model.page_numbers import FLOAT8, PageNumbers

rotary: Any = pytest.importorskip("worker.model.kernels.rotary", exc_type=ModuleNotFoundError)
activation: Any = pytest.importorskip(
    "worker.model.kernels.activation", exc_type=ModuleNotFoundError
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, TOKENS_PER_BLOCK = 5, 4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def poisoned_pages(num_kv: int, dim: int) -> torch.Tensor:
    """Slot-major storage in which a layer's pages are one part of each slot."""
    slot = 2 * num_kv * TOKENS_PER_BLOCK * dim
    whole = torch.full((SLOTS, 3 * slot), float("nan"), device=DEVICE)
    return whole.as_strided(
        (SLOTS, 2, num_kv, TOKENS_PER_BLOCK, dim),
        (3 * slot, slot // 2, TOKENS_PER_BLOCK * dim, dim, 1),
        slot,
    )


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    first, kept = heads[..., :size], heads[..., size:]
    other = torch.cat((-first[..., size // 2 :], first[..., : size // 2]), -1)
    return torch.cat((first * cos[:, None] + other * sin[:, None], kept), -1)


@pytest.mark.parametrize(
    ("num_query", "num_kv", "dim", "rotated"),
    [(6, 2, 16, 16), (3, 1, 12, 12), (9, 3, 20, 8), (16, 8, 8, 8)],
)
@pytest.mark.parametrize("normed", ["norm", "no norm"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_against_torch(
    num_query: int, num_kv: int, dim: int, rotated: int, normed: str, index: torch.dtype
) -> None:
    slots = torch.tensor([3, 0, -1, 3], dtype=index, device=DEVICE)
    offsets = torch.tensor([1, 3, 2, 2], dtype=index, device=DEVICE)
    heads = random(4, num_query + 2 * num_kv, dim)
    halves = random(4, rotated // 2), random(4, 1 + rotated // 2)[:, 1:]
    cos, sin = (torch.cat((half, half), -1).contiguous() for half in halves)
    weight = random(num_query + num_kv, dim) if normed == "norm" else None
    query_key = heads[:, : num_query + num_kv]
    if weight is not None:
        query_key = rms_norm(query_key, (dim,), None, 0.1) * weight
    expected = torch.cat((turned(query_key, cos, sin), heads[:, num_query + num_kv :]), 1)
    pages = poisoned_pages(num_kv, dim)
    rotary.rotate_and_store(
        heads,
        rotary.Rotary(cos, sin),
        None if weight is None else rotary.HeadNorm(weight, 0.1),
        rotary.Places(slots, offsets),
        pages,
    )
    torch.testing.assert_close(heads, expected, atol=1e-5, rtol=1e-5)
    wanted = poisoned_pages(num_kv, dim)
    for token, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
        if slot >= 0:
            wanted[slot, :, :, offset] = heads[token, num_query:].view(2, num_kv, dim)
    assert torch.equal(pages.nan_to_num(9.0), wanted.nan_to_num(9.0))


def test_refused() -> None:
    angles, places = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    heads, pages = torch.zeros(2, 4, 8), torch.zeros(3, 2, 1, 4, 8)
    good = {"angles": angles, "slots": places, "heads": heads, "pages": pages}
    for change, match in (
        ({"pages": torch.zeros(3, 2, 1, 4, 6)}, "vectors of 8"),
        ({"pages": torch.zeros(3, 2, 2, 4, 8)}, "fewer than 4 / 2"),
        ({"angles": torch.zeros(2, 10)}, "even number up to 8"),
        ({"angles": torch.zeros(1, 8)}, r"cos and sin \[2"),
        ({"slots": places[:1]}, "a place for each of 2"),
        ({"heads": torch.zeros(2, 8, 4).mT}, "heads contiguous"),
    ):
        part: dict[str, torch.Tensor] = {**good, **change}
        with pytest.raises(AttentionInputError, match=match):
            rotary.rotate_and_store(
                part["heads"],
                rotary.Rotary(part["angles"], part["angles"]),
                None,
                rotary.Places(part["slots"], places),
                part["pages"],
            )


@pytest.mark.parametrize("width", [5, 1024, 1030])
def test_silu_product(width: int) -> None:
    both = random(3, 2 * width)
    expected = silu(both[:, :width]) * both[:, width:]
    torch.testing.assert_close(activation.silu_product(both), expected)


def test_float8_pages_hold_what_the_row_over_its_scale_is() -> None:
    """Bit for bit what the reference stores of the turned rows."""
    heads, angles = random(3, 7, 16), random(3, 16)
    heads[1, -1] *= 1e4
    scales = torch.tensor([[1.5, 0.3], [0.7, 2.5]], device=DEVICE)
    pages = torch.zeros(SLOTS, 2, 2, TOKENS_PER_BLOCK, 16, dtype=FLOAT8, device=DEVICE)
    places = [torch.arange(3, dtype=torch.int32, device=DEVICE)] * 2
    both = rotary.Rotary(angles, angles), rotary.Places(*places)
    rotary.rotate_and_store(heads, both[0], None, both[1], pages, scales)
    expected = PageNumbers(pages, 2, scales).stored(heads[:, 3:].view(3, 2, 2, 16))
    found = pages[[0, 1, 2], :, :, [0, 1, 2]]
    assert torch.equal(found.float(), expected.float())
    assert (found[1, 1, 1].float().abs() == 448).any()
    with pytest.raises(AttentionInputError, match="got none"):
        rotary.rotate_and_store(heads, both[0], None, both[1], pages)
