"""The attention kernels against the definition: on a CPU through Triton's interpreter, on a GPU
compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.devices import DEVICES, usable
from tests.worker.model.kernels.paged_case import Layer, PagedCase
from worker.model.errors import AttentionInputError
from worker.model.kernels import tilings
from worker.model.page_numbers import FLOAT8
from worker.model.step import GroupGeometry
from worker.model.step_metadata import MetadataShape, StepMetadata
from worker.model.triton_attention import KernelPages, TritonAttention, read, write

HALF, BRAIN = torch.float16, torch.bfloat16
MIXED = ((0, 1), (5, 1), (37, 1), (0, 9), (13, 20))
LONG = ((0, 1), (3, 140))
SCALES = (1.5, 0.3, 0.7, 2.5)
FP8: Final[dict[str, Any]] = {"page_dtype": FLOAT8, "scales": SCALES}


def attend(case: PagedCase, shape: MetadataShape | None = None) -> torch.Tensor:
    found = TritonAttention([case.pages]).attend(
        case.metadata(shape), 0, case.query, case.new, case.layer.dim**-0.5, case.layer.softcap
    )
    return found.float()


def check(case: PagedCase) -> None:
    coarse = case.layer.query_dtype != torch.float32
    found, expected = attend(case), case.expected()
    torch.testing.assert_close(
        found, expected, atol=8e-3 if coarse else 2e-5, rtol=8e-3 if coarse else 2e-5
    )


LAYERS = {
    "plain": Layer(),
    "one head each": Layer(group=1, kv_heads=3),
    "seven to one": Layer(group=7, kv_heads=1, dim=24),
    "window": Layer(window=11),
    "window of one": Layer(window=1),
    "window and sinks": Layer(window=9, sinks=5),
    "long window and sinks": Layer(window=40, sinks=20, block=4),
    "softcap": Layer(softcap=2.0),
    "head 80": Layer(dim=80, block=64),
    "head 96, half": Layer(dim=96, block=32, query_dtype=HALF, page_dtype=HALF),
    "head 256": Layer(dim=256, block=32, kv_heads=1),
    "sub-pages": Layer(block=64, page=32, window=50, sinks=3),
    "sub-pages across tiles": Layer(block=12, page=4),
    "fp8 pages": Layer(query_dtype=HALF, **FP8),
    "fp8 pages, float32, window": Layer(window=12, sinks=2, block=64, page=32, **FP8),
    "half, softcap, window": Layer(
        query_dtype=HALF, page_dtype=HALF, softcap=3.0, window=20, dim=64, block=16
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_mixed_batch_equals_the_definition(name: str, device: str) -> None:
    check(PagedCase(LAYERS[name], MIXED, usable(device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [Layer(group=1), Layer(group=1, window=60, sinks=2)])
def test_a_chunk_of_several_tiles(layer: Layer, device: str) -> None:
    check(PagedCase(layer, LONG, usable(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_without_wanted_logits_can_be_left_out(device: str) -> None:
    case = PagedCase(Layer(), [(0, 1), (4, 130), (3, 140), (0, 128)], usable(device))
    case.pieces[2] = case.pieces[2]._replace(wants_logits=False)
    metadata = case.metadata()
    write(case.pages, metadata, case.new, torch.float32)
    found = read(case.pages, metadata.of_drawn(), case.query, case.layer.dim**-0.5)
    ends = metadata.first_rows[1:].cpu() - 1
    drawn = ends[[piece.wants_logits for piece in case.pieces]]
    assert len(drawn) == 3
    torch.testing.assert_close(found[drawn], case.expected()[drawn], atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [Layer(dim=128, block=64), Layer(dim=80, block=32, window=30)])
@pytest.mark.parametrize("pages", [{"page_dtype": BRAIN}, FP8])
def test_bfloat16(layer: Layer, pages: dict[str, Any]) -> None:
    check(PagedCase(replace(layer, query_dtype=BRAIN, **pages), MIXED, usable("cuda")))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(2, 20))),
        min_size=1,
        max_size=4,
    ),
    block=st.sampled_from([1, 8, 12, 32]),
    window=st.sampled_from([None, 1, 5, 13]),
    sinks=st.sampled_from([0, 1, 6]),
    seed=st.integers(0, 100),
)
def test_any_batch(
    lengths: list[tuple[int, int]], block: int, window: int | None, sinks: int, seed: int
) -> None:
    if block == 1:
        lengths = [(start % 8, 1 + count % 4) for start, count in lengths]
    layer = Layer(block=block, window=window, sinks=sinks if window else 0, kv_heads=1, group=3)
    check(PagedCase(layer, lengths, seed=seed))


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_are_neither_read_nor_written(device: str) -> None:
    """A decode batch in a larger bucket leaves every other byte of pages alone."""
    case = PagedCase(Layer(**FP8), [(4, 1), (30, 1), (0, 1)], usable(device))
    expected = case.expected()
    shape = MetadataShape.for_decode(8, [9])
    metadata = case.metadata(shape)
    query, new = case.query.new_full((8, 4, 16), np.nan), case.new.new_full((8, 2, 2, 16), np.nan)
    query[:3], new[:3] = case.query, case.new
    before = case.raw.view(torch.uint8).clone()
    found = TritonAttention([case.pages]).attend(metadata, 0, query, new, 0.25)
    torch.testing.assert_close(found[:3], expected, atol=2e-5, rtol=2e-5)
    for piece in case.pieces:
        case.row(piece.block_tables[0], piece.start).fill_(float("nan"))
    after = case.raw.view(torch.uint8)
    assert (after != before).sum() == 0


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_any_number_of_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Short sequences have fewer tiles than parts."""
    monkeypatch.setattr("worker.model.triton_attention.splits_of", lambda *_: splits)
    check(PagedCase(Layer(), [(0, 1), (70, 1), (129, 1)]))


def test_written_rows_are_stored_with_the_reciprocal_scale() -> None:
    case = PagedCase(Layer(**FP8), [(3, 5)])
    metadata = case.metadata()
    huge = case.new.clone()
    huge[1] = 1e6
    write(case.pages, metadata, huge, torch.float32)
    scales = case.pages.scales
    assert scales is not None
    stored = case.row(case.pieces[0].block_tables[0], 3).float()
    torch.testing.assert_close(stored * scales[..., None], case.seen(case.new[0]))
    assert (case.row(case.pieces[0].block_tables[0], 4).float() == 448).all()


def test_metadata_overwritten_in_place_describes_the_next_step() -> None:
    """What a captured graph relies on: views stay, values change."""
    shape = MetadataShape.for_decode(4, [9])
    first = PagedCase(Layer(), [(4, 1), (30, 1)])
    second = PagedCase(Layer(), [(8, 1), (9, 1), (60, 1)], seed=1)
    held = first.metadata(shape)
    held.vector.copy_(second.metadata(shape).vector)
    query, new = torch.zeros(4, 4, 16), torch.zeros(4, 2, 2, 16)
    query[:3], new[:3] = second.query, second.new
    found = TritonAttention([second.pages]).attend(held, 0, query, new, 0.25)
    torch.testing.assert_close(found[:3], second.expected(), atol=2e-5, rtol=2e-5)


class TestRefusals:
    def test_short_rows(self) -> None:
        case = PagedCase(Layer(), [(3, 5)])
        metadata = case.metadata()
        with pytest.raises(AttentionInputError, match="rows for every token"):
            write(case.pages, metadata, case.new[:-1], torch.float32)
        with pytest.raises(AttentionInputError, match="expected query"):
            read(case.pages, metadata, case.query[:-1], 1.0)

    def test_another_dtype(self) -> None:
        case = PagedCase(Layer(), [(3, 5)])
        metadata = case.metadata()
        with pytest.raises(
            AttentionInputError, match=r"expected query in torch\.float32.*got torch\.float16"
        ):
            read(case.pages, metadata, case.query.half(), 1.0)
        eight = PagedCase(Layer(**FP8), [(3, 5)])
        with pytest.raises(AttentionInputError, match="expected key and value"):
            TritonAttention([eight.pages]).attend(
                eight.metadata(), 0, eight.query, eight.new.half(), 1.0
            )

    def test_another_device(self) -> None:
        case = PagedCase(Layer(), [(3, 5)])
        elsewhere = StepMetadata(case.metadata().shape, case.metadata().vector.to("meta"))
        with pytest.raises(AttentionInputError, match="on meta"):
            read(case.pages, case.metadata(), case.query.to("meta"), 1.0)
        with pytest.raises(AttentionInputError, match="metadata on cpu"):
            read(case.pages, elsewhere, case.query, 1.0)

    def test_strided_vectors(self) -> None:
        case = PagedCase(Layer(), [(3, 5)])
        query = case.query.repeat_interleave(2, 2)[:, :, ::2]
        with pytest.raises(AttentionInputError, match="contiguous query vectors"):
            read(case.pages, case.metadata(), query, 1.0)

    def test_scales(self) -> None:
        geometry = GroupGeometry(8, None, 0, 4, 1)
        eight, full = torch.zeros(4, 2, 2, 8, 16, dtype=FLOAT8), torch.zeros(4, 2, 2, 8, 16)
        with pytest.raises(AttentionInputError, match="got none"):
            KernelPages(eight, 0, geometry)
        for pages, scales in (
            (full, torch.ones(2, 2)),
            (eight, torch.ones(2, 3)),
            (eight, torch.ones(2, 2, dtype=torch.float64)),
            (eight, torch.ones(2, 2, device="meta")),
        ):
            with pytest.raises(AttentionInputError, match="expected contiguous float32 scales"):
                KernelPages(pages, 0, geometry, scales)

    def test_pages(self) -> None:
        geometry = GroupGeometry(8, None, 0, 4, 1)
        with pytest.raises(AttentionInputError, match="expected pages"):
            KernelPages(torch.zeros(4, 1, 2, 8, 16), 0, geometry)
        with pytest.raises(AttentionInputError, match="blocks of 8 tokens"):
            KernelPages(torch.zeros(4, 2, 2, 4, 16), 0, geometry)
        with pytest.raises(AttentionInputError, match="expected pages in"):
            KernelPages(torch.zeros(4, 2, 2, 8, 16, dtype=torch.float64), 0, geometry)


def test_splits_fill_the_machine_and_depend_on_the_shape_alone() -> None:
    assert tilings.splits_of(64, 8, 64) == 4
    assert tilings.splits_of(1, 8, 64) == 64
    assert tilings.splits_of(1, 8, 3) == 4
    assert tilings.splits_of(256, 8, 64) == 1
    with pytest.raises(ValueError, match="at most 256"):
        tilings.decode_tiling(BRAIN, 512)
