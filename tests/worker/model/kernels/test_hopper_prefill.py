"""The prefill kernel for capability 9.0: against the definition on such a device; elsewhere that it
compiles for one, and which pages it is given.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from tests.worker.model.kernels.hopper import MOST_SHARED_BYTES, compiled, hopper_device
from tests.worker.model.kernels.paged_case import Layer, PagedCase
from tests.worker.model.kernels.test_paged_attention import MIXED, check
from worker.model.hopper_attention import rows_of
from worker.model.triton_attention import read, write

HALF, BRAIN = torch.float16, torch.bfloat16
WIDE: Final[dict[str, Any]] = {"dim": 128, "query_dtype": BRAIN, "page_dtype": BRAIN}

LAYERS = {
    "one tile a block": Layer(block=128, **WIDE),
    "two blocks a tile": Layer(block=64, **WIDE),
    "eight blocks a tile": Layer(block=16, **WIDE),
    "blocks of several tiles": Layer(block=256, **WIDE),
    "blocks that are no power of two": Layer(block=96, **WIDE),
    "sub-pages": Layer(block=64, page=32, **WIDE),
    "sub-pages of several tiles": Layer(block=512, page=256, kv_heads=1, **WIDE),
    "seven to one": Layer(block=64, group=7, kv_heads=1, **WIDE),
    "one head each": Layer(block=64, group=1, kv_heads=3, **WIDE),
    "half": Layer(block=64, dim=128, query_dtype=HALF, page_dtype=HALF),
    "half the width": Layer(block=64, dim=64, query_dtype=BRAIN, page_dtype=BRAIN),
}
LENGTHS = ((0, 1), (5, 1), (0, 127), (0, 129), (64, 65), (127, 2), (200, 140), (517, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_it_equals_the_definition(name: str) -> None:
    """NaN lies wherever nothing visible does: behind ends, in other layers, in free blocks."""
    case = PagedCase(LAYERS[name], LENGTHS, hopper_device())
    assert case.pages.boxes is not None
    assert case.pages.boxes.takes(case.query, 1.0)
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [(0, 4096), (3000, 1500)])
def test_a_long_prompt_equals_the_triton_kernel(
    given: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(block=64, kv_heads=2, group=4, **WIDE)
    case = PagedCase(layer, [given, (0, 700)], hopper_device())
    metadata = case.metadata()
    write(case.pages, metadata, case.new, BRAIN)
    found = read(case.pages, metadata, case.query, 0.1)
    monkeypatch.setattr(case.pages, "boxes", None)
    expected = read(case.pages, metadata, case.query, 0.1)
    torch.testing.assert_close(found, expected, atol=8e-3, rtol=8e-3)


@pytest.mark.gpu
def test_a_query_that_copies_cannot_take_is_left_to_the_triton_kernel() -> None:
    case = PagedCase(Layer(block=64, **WIDE), [(0, 40)], hopper_device())
    assert case.pages.boxes is not None
    assert not case.pages.boxes.takes(case.query, -1.0)
    apart = case.query.repeat_interleave(2, 1)[:, ::2]
    assert not case.pages.boxes.takes(apart, 1.0)
    case.query = apart
    check(case)


@pytest.mark.gpu
def test_scaled_pages_and_windows_are_left_to_the_triton_kernel() -> None:
    case = PagedCase(Layer(block=64, window=100, **WIDE), MIXED, hopper_device())
    assert case.pages.boxes is None


def pages(*shape: int, dtype: torch.dtype = BRAIN) -> torch.Tensor:
    """Views of layers: ``[slots, kinds, pages, heads, tokens, dim]``."""
    slots, kinds, per_block, heads, tokens, dim = shape
    raw = torch.zeros(slots, 3, kinds, per_block, heads, tokens, dim, dtype=dtype)
    return raw[:, 1]


def test_pages_are_a_matrix_of_rows() -> None:
    view = pages(5, 2, 2, 4, 32, 128)
    found = rows_of(view)
    assert found is not None
    count, (slot, kind, page, head), box = found
    assert box == 32
    matrix = view.as_strided((count, 128), (128, 1))
    matrix[3 * slot + kind + page + 2 * head + 7] = 9
    assert (view[3, 1, 1, 2, 7] == 9).all()
    assert (view == 9).sum() == 128
    matrix[count - 1] = 8
    assert (view[-1, -1, -1, -1, -1] == 8).all()


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (pages(2, 2, 1, 1, 64, 128, dtype=torch.float32), "no 16 bits"),
        (pages(2, 2, 1, 1, 64, 80), "no width of a swizzled row"),
        (pages(2, 2, 1, 1, 24, 128), "boxes of 8"),
        (pages(2, 2, 1, 64, 4, 128).transpose(3, 4), "tokens not next to each other"),
        (pages(2, 2, 1, 1, 64, 256)[..., 64:192], "rows within longer ones"),
        (torch.zeros(2 * 2 * 64 * 128 + 1, dtype=BRAIN)[1:].view(2, 2, 1, 1, 64, 128), "address"),
        (torch.empty(2**18, 2, 1, 64, 128, 128, dtype=BRAIN, device="meta"), "2 ** 31 rows"),
    ],
)
def test_pages_that_copies_by_row_cannot_read(view: torch.Tensor, why: str) -> None:
    assert rows_of(view) is None, why


@pytest.mark.parametrize(("box", "dim"), [(64, 128), (32, 64)])
def test_it_compiles_where_there_is_no_such_device(box: int, dim: int) -> None:
    lists = ("table", "starts", "lengths", "first_rows", "tile_sequences", "tile_offsets")
    found = compiled(
        "hopper_prefill.hopper_prefill_tile",
        constants={"GROUP": 4, "DIM": dim, "BLOCK_TOKENS": 64, "PAGE_TOKENS": box, "BOX": box},
        boxes={"pages": (box, dim), "queries": (64, dim)},
        pointers={"out": "*bf16", "scale": "fp32", **dict.fromkeys(lists, "*i32")},
    )
    assert 0 < found.shared_bytes <= MOST_SHARED_BYTES
    # Two groups have scores and sums twice each, in and beside the loop; 16 numbers a product.
    assert found.text.count("wgmma.mma_async") == 2 * 2 * (dim + 128) // 16
    parts_of_128_bytes = dim // 64
    assert found.text.count("cp.async.bulk.tensor") == parts_of_128_bytes * (2 + 2 * 128 // box)
