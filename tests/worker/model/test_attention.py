"""Paged attention against its definition: any mix of lengths, windows, sinks, caps and slot
orders.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.model import step as step_module
from worker.model.attention import LayerPages, Scratch, StepContext, attend
from worker.model.page_numbers import FLOAT8, PageNumbers
from worker.model.step import GroupGeometry, SequenceSlice, check_batch, order, plan_group

KV_HEADS, GROUP, DIM = 2, 3, 8
SCALES = torch.tensor([[1.5, 0.3], [0.7, 0.02]])
"""Those of keys, then of values."""

sequences = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))),
    min_size=1,
    max_size=6,
)


def naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    geometry: GroupGeometry,
    softcap: float | None,
) -> torch.Tensor:
    """One query ``[heads, dim]`` over all keys ``[tokens, kv_heads, dim]``, written out."""
    window = geometry.window or position + 1
    seen = [p for p in range(position + 1) if p > position - window or p < geometry.sink_tokens]
    rows = []
    for head in range(KV_HEADS * GROUP):
        scores = keys[seen, head // GROUP] @ query[head] * DIM**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.softmax(scores, 0) @ values[seen, head // GROUP])
    return torch.stack(rows)


def stored(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What pages hold of rows ``[..., 2, kv_heads, dim]``."""
    return rows if scales is None else (rows / scales[..., None]).clamp(-448, 448).to(FLOAT8)


@settings(max_examples=80, deadline=None)
@given(
    lengths=sequences,
    size=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([None, 1, 5, 8, 13]),
    sinks=st.sampled_from([0, 1, 6]),
    softcap=st.sampled_from([None, 2.0]),
    scales=st.sampled_from([None, SCALES]),
    seed=st.integers(0, 100),
)
def test_equals_the_definition(
    lengths: list[tuple[int, int]],
    size: int,
    window: int | None,
    sinks: int,
    softcap: float | None,
    scales: torch.Tensor | None,
    seed: int,
) -> None:
    geometry = GroupGeometry(size, window, sinks if window else 0, 1024, 1 << 18)
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((1024, 2, KV_HEADS, size, DIM), float("nan"))
    pages = pages if scales is None else pages.to(FLOAT8)
    free = list(random.permutation(1024))
    layer = LayerPages(pages, 0, scales)
    batch, histories = [], []
    for start, count in lengths:
        end = start + count
        table = np.array([free.pop() for _ in range(-(-end // size))], np.int32)
        pages[torch.from_numpy(table).long()] = 0  # what the runner does with begun slots
        history = torch.randn(end, 2, KV_HEADS, DIM, generator=generator)
        for p in range(start):
            pages[table[p // size], :, :, p % size] = stored(history[p], scales)
        batch.append(SequenceSlice(np.zeros(count, np.int32), start, (table,), wants_logits=True))
        histories.append(history)
    flat = order(batch)
    pieces = [batch[i] for i in flat]
    check_batch(pieces, [geometry])
    like = torch.empty(0)
    step = plan_group(pieces, 0, geometry, like)
    rows = sum(len(piece.tokens) for piece in pieces)
    query = torch.randn(rows, KV_HEADS * GROUP, DIM, generator=generator)
    new = torch.cat([histories[i][batch[i].start :] for i in flat])
    context = StepContext((layer,), (step,), rows, Scratch(like), ((None,) * len(step.decode),))
    found = attend(context, 0, query, new, DIM**-0.5, softcap)
    row = 0
    for i in flat:
        held = stored(histories[i], scales)
        keys, values = (held if scales is None else held.float() * scales[..., None]).unbind(1)
        for position in range(batch[i].start, batch[i].end):
            expected = naive(query[row], keys, values, position, geometry, softcap)
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)
            row += 1
        for p in range(batch[i].start, batch[i].end):
            slot = batch[i].block_tables[0][p // size]
            assert torch.equal(pages[slot, :, :, p % size].float(), held[p].float())


def test_long_sequences_do_not_make_short_ones_pay() -> None:
    """Padding stays small, and a bucket fits the cache."""
    geometry = GroupGeometry(64, None, 0, 100_000, 98_304)
    lengths = [10, 20, 70, 75, 80, 1000, 1010, 4000]
    batch = [
        SequenceSlice(
            np.zeros(1, np.int32), n - 1, (np.arange(63, dtype=np.int32),), wants_logits=True
        )
        for n in lengths
    ]
    step = plan_group(batch, 0, geometry, torch.empty(0))
    used = sum(-(-n // 64) for n in lengths)
    read = sum(len(bucket.slots) for bucket in step.decode)
    assert read <= used + 6
    for bucket in step.decode:
        several = len(bucket.slots) > bucket.width
        assert not several or len(bucket.slots) * 98_304 <= step_module.BUCKET_BYTES
    covered = sorted(row for bucket in step.decode for row in range(8)[bucket.rows])
    assert covered == list(range(8))


def test_pages_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="expected pages"):
        LayerPages(torch.zeros(4, 1, 2, 8, 16), 0)


class TestPageNumbers:
    """float8 pages: x / scale, saturated. Scales are no powers of two, so a reciprocal shows."""

    PAGES = torch.zeros(4, 2, KV_HEADS, 8, DIM, dtype=FLOAT8)

    def test_what_does_not_fit_saturates(self) -> None:
        numbers = PageNumbers(self.PAGES, KV_HEADS, torch.full((2, KV_HEADS), 1.5))
        row = torch.tensor([3.0, -1.6, 672.0, 673.0, -1e30, float("inf"), float("nan"), 1e-9])
        held = numbers.stored(row.expand(2, KV_HEADS, 8))[1, 1].float()
        assert held[:6].tolist() == [2.0, -1.125, 448.0, 448.0, -448.0, 448.0]
        assert held[6].isnan()
        assert held[7] == 0
        seen = numbers.seen(numbers.stored(row.expand(2, KV_HEADS, 8)), torch.float32)[0, 0]
        assert seen[:3].tolist() == [3.0, -1.6875, 672.0]

    def test_refusals(self) -> None:
        full = torch.zeros(4, 2, KV_HEADS, 8, DIM)
        with pytest.raises(ValueError, match="got none"):
            LayerPages(self.PAGES, 0)
        for pages, scales in (
            (full, SCALES),
            (self.PAGES, SCALES[:, :1].contiguous()),
            (self.PAGES, SCALES.t()),
            (self.PAGES, SCALES.double()),
            (self.PAGES, SCALES.to("meta")),
        ):
            with pytest.raises(ValueError, match="expected contiguous float32 scales"):
                LayerPages(pages, 0, scales)
        with pytest.raises(ValueError, match="expected pages in float32"):
            LayerPages(full.double(), 0)
