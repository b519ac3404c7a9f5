"""The paged runner equals transformers' own forward: every family, chunked, mixed, in shuffled
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICES, usable
from tests.support.models import FAMILIES, WINDOW
from tests.worker.model.harness import PagedModel
from worker.model.errors import AttentionInputError

TOLERANCE = {"cpu": 2e-4, "cuda": 2e-3}


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Check:
    """Feeds a paged model and keeps every logit row with all the tokens it follows."""

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged
        self.rows: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def __call__(self, **pieces: Sequence[int]) -> None:
        found = self.paged.feed(**pieces)
        assert found.shape == (len(pieces), self.paged.loaded.vocab_size)
        assert found.dtype == torch.float32
        for name, row in zip(pieces, found, strict=True):
            self.rows.append((tuple(self.paged.tokens[name]), row))

    def equal(self, reference: Any, tolerance: float) -> None:
        """Every row is the reference's, of one forward over the longest sequence that begins so."""
        known: dict[tuple[int, ...], torch.Tensor] = {}
        assert self.rows
        for text, row in sorted(self.rows, key=lambda kept: -len(kept[0])):
            if text not in known:
                with torch.inference_mode():
                    logits = reference(torch.tensor([text])).logits[0]
                known |= {text[: end + 1]: logits[end] for end in range(len(text))}
            torch.testing.assert_close(row, known[text], atol=tolerance, rtol=0)


@pytest.fixture(params=DEVICES)
def check(
    request: pytest.FixtureRequest,
    family: str,
    tiny_model: Callable[[str], Path],
    reference: Callable[[Path], Any],
) -> Iterator[Check]:
    """Compared with the reference when the test is over."""
    device = usable(request.param)
    path = tiny_model(family)
    check = Check(PagedModel(path, device=device))
    yield check
    check.equal(reference(path), TOLERANCE[device])


def test_whole_prompt_then_decode(check: Check) -> None:
    check(a=tokens(37, 1))
    for step in range(20):
        check(a=tokens(1, 100 + step))


def test_one_token_prompt(check: Check) -> None:
    check(a=[7])
    check(a=[9])
    check(a=[11])


@pytest.mark.parametrize("chunk", [3, 8, 13])
def test_chunked_prefill(check: Check, chunk: int) -> None:
    prompt = tokens(70, 2)
    for start in range(0, len(prompt), chunk):
        check(a=prompt[start : start + chunk])
    check(a=[5])


def test_mixed_batches(check: Check) -> None:
    check(a=tokens(30, 3), b=tokens(1, 4), c=tokens(9, 5))
    check(b=tokens(17, 6), a=tokens(1, 7), c=tokens(1, 8))
    check(c=tokens(1, 9), d=tokens(41, 10), b=tokens(1, 11), a=tokens(5, 12))
    for step in range(12):
        check(**{name: tokens(1, 20 + step) for name in "dbca"})
    assert len(check.rows) == 3 + 3 + 4 + 48


def test_lengths_around_block_and_window(check: Check) -> None:
    """Windows cross blocks at every offset, contexts end at, before and after a block boundary."""
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17):
        check(**{f"s{length}": tokens(length, length)})
    for step in range(18):
        names = [f"s{length}" for length in (17, WINDOW, 15, WINDOW - 1, 16, WINDOW + 1)]
        check(**{name: tokens(1, 50 + step) for name in names})


def test_rewound_positions_are_overwritten(check: Check) -> None:
    check(a=tokens(20, 1))
    check(a=tokens(6, 2))
    del check.paged.tokens["a"][20:]
    check(a=tokens(3, 3))
    check(a=tokens(1, 4))


def test_logits_only_where_wanted(tiny_model: Callable[[str], Path]) -> None:
    paged = PagedModel(tiny_model("llama"))
    pieces = [
        paged.slice("a", tokens(9, 1), wants_logits=False),
        paged.slice("b", tokens(1, 2)),
        paged.slice("c", tokens(4, 3), wants_logits=False),
        paged.slice("d", tokens(6, 4)),
    ]
    assert paged.runner.forward(pieces).shape == (2, paged.loaded.vocab_size)
    nothing = paged.runner.forward([paged.slice("e", tokens(4, 5), wants_logits=False)])
    assert nothing.shape == (0, paged.loaded.vocab_size)


def test_tokens_of_the_step_before_are_taken_from_the_feed(
    tiny_model: Callable[[str], Path],
) -> None:
    fed, plain = (PagedModel(tiny_model("qwen2")) for _ in range(2))
    for paged in (fed, plain):
        paged.feed(a=tokens(5, 1), b=tokens(9, 2))
    fed.runner.feed.put(torch.tensor([7, 11, 13]))
    pieces = [
        fed.slice("b", [0])._replace(feed=2),
        fed.slice("c", tokens(6, 3)),
        fed.slice("a", [0])._replace(feed=0),
    ]
    expected = plain.feed(b=[13], c=tokens(6, 3), a=[7])
    torch.testing.assert_close(fed.runner.forward(pieces), expected, atol=0, rtol=0)
    with pytest.raises(ValueError, match="at most 1024 draws"):
        fed.runner.feed.put(torch.zeros(1025, dtype=torch.int64))


def test_rows_do_not_see_each_other(tiny_model: Callable[[str], Path]) -> None:
    """A sequence whose keys are NaN spoils no other row of its batch."""
    paged = PagedModel(tiny_model("llama"))
    clean = PagedModel(tiny_model("llama"))
    with torch.no_grad():
        embedding = paged.loaded.module.get_input_embeddings().weight
        embedding[200] = float("nan")
    paged.feed(a=tokens(12, 1), bad=[200, 200, 200])
    clean.feed(a=tokens(12, 1))
    found = paged.feed(a=[3], bad=[1])
    assert torch.isnan(found[1]).all()
    torch.testing.assert_close(found[0], clean.feed(a=[3])[0], atol=2e-5, rtol=0)


class TestRefused:
    """Inconsistent steps are refused before anything is computed, and say what was expected."""

    @pytest.fixture
    def paged(self, tiny_model: Callable[[str], Path]) -> PagedModel:
        return PagedModel(tiny_model("llama"))

    def refuse(self, paged: PagedModel, match: str, **changes: Any) -> None:
        good = paged.slice("a", tokens(12, 1))
        bad = good._replace(**changes)
        with pytest.raises(AttentionInputError, match=match):
            paged.runner.forward([bad])

    def test_empty_batch(self, paged: PagedModel) -> None:
        with pytest.raises(AttentionInputError, match="at least one sequence"):
            paged.runner.forward([])

    def test_no_tokens(self, paged: PagedModel) -> None:
        self.refuse(paged, "expected tokens int32", tokens=np.zeros(0, np.int32))

    def test_wrong_token_dtype(self, paged: PagedModel) -> None:
        self.refuse(paged, "expected tokens int32", tokens=np.zeros(3, np.int64))

    def test_negative_start(self, paged: PagedModel) -> None:
        self.refuse(paged, "start >= 0", start=-1)

    def test_short_table(self, paged: PagedModel) -> None:
        self.refuse(paged, "12 tokens need 2 blocks", block_tables=(np.array([4], np.int32),))

    def test_missing_table(self, paged: PagedModel) -> None:
        self.refuse(paged, "expected 1 block tables", block_tables=())

    def test_stale_block(self, paged: PagedModel) -> None:
        self.refuse(paged, "expected slots in 0..95", block_tables=(np.array([4, -1], np.int32),))

    def test_slot_outside_the_pool(self, paged: PagedModel) -> None:
        self.refuse(paged, "expected slots in 0..95", block_tables=(np.array([96, 1], np.int32),))
