"""Keys and values kept between steps are what the pages hold, whoever comes, goes, pauses or goes
back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.model.harness import PagedModel
from worker.executor import ModelExecutor
from worker.messages import SamplingParams
from worker.model.attention import LayerPages
from worker.model.backend import TorchBackend
from worker.model.kept_keys import KeptKeys
from worker.model.runner import ModelRunner, SequenceSlice
from worker.model.step import DecodeBucket
from worker.ports import Draw, Slice

TinyModel = Callable[[str], Path]
DRAW = Draw(SamplingParams(), 0, 0, np.zeros(0, np.int32), np.zeros(0, np.int32), ())


class TwoWays:
    """The same sequences in two models, of which one is told whose they are."""

    def __init__(self, path: Path, kv_dtype: str = "auto") -> None:
        self._models = [
            PagedModel(path, slots=300, device="cpu", kv_dtype=kv_dtype)  # type: ignore[arg-type]
            for _ in range(2)
        ]
        self._owners: dict[str, int] = {}

    def step(self, **pieces: list[int]) -> None:
        """One step in both, compared."""
        for name in pieces:
            self._owners.setdefault(name, len(self._owners))
        told, untold = (
            [model.slice(name, tokens) for name, tokens in pieces.items()] for model in self._models
        )
        told = [
            piece._replace(owner=self._owners[name])
            for name, piece in zip(pieces, told, strict=True)
        ]
        found = [
            model.runner.forward(batch)
            for model, batch in zip(self._models, (told, untold), strict=True)
        ]
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)

    def go_back(self, name: str, tokens: int) -> None:
        """Forget the sequence's last tokens, as after a wrong guess."""
        for model in self._models:
            del model.tokens[name][-tokens:]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of blocks of every gather."""
    seen: list[int] = []
    gather = LayerPages.gather

    def counted(self: LayerPages, slots: torch.Tensor, *others: object) -> torch.Tensor:
        seen.append(len(slots))
        return gather(self, slots, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerPages, "gather", counted)
    return seen


@pytest.mark.parametrize(
    ("family", "kv_dtype"), [("llama", "auto"), ("gemma3_text", "auto"), ("llama", "fp8")]
)
def test_any_order_of_events(tiny_model: TinyModel, family: str, kv_dtype: str) -> None:
    random = np.random.default_rng(1)
    ways = TwoWays(tiny_model(family), kv_dtype)
    running: list[str] = []
    lengths: dict[str, int] = {}
    for number in range(150):
        event = random.integers(0, 10)
        pieces: dict[str, list[int]] = {}
        if len(running) < 2 or (event == 0 and len(running) < 6):
            name = f"s{len(lengths)}"
            lengths[name] = int(random.integers(2, 20))
            pieces[name] = random.integers(1, 90, lengths[name]).tolist()
        elif event == 1:
            running.remove(running[int(random.integers(len(running)))])
        elif event == 2 and family != "gemma3_text":  # whose window has passed some blocks
            name = running[int(random.integers(len(running)))]
            lengths[name] -= (back := int(random.integers(1, min(5, lengths[name]))))
            ways.go_back(name, back)
        paused = running[0] if event == 3 else None
        for name in random.permutation([n for n in running if n != paused]):
            count = 3 if event == 4 and random.integers(4) == 0 else 1
            pieces[str(name)] = random.integers(1, 90, count).tolist()
            lengths[str(name)] += count
        running += [name for name in pieces if name not in running]
        assert pieces or not running, number
        if pieces:
            ways.step(**pieces)


def test_pages_are_gathered_once_and_when_a_block_is_full(
    tiny_model: TinyModel, gathers: list[int]
) -> None:
    model = PagedModel(tiny_model("llama"))
    layers = len(model.loaded.specs)

    def step(**pieces: list[int]) -> None:
        batch = [model.slice(n, t)._replace(owner=ord(n)) for n, t in pieces.items()]
        model.runner.forward(batch)

    step(a=[1] * 9, b=[2] * 9)
    assert not gathers
    step(a=[3], b=[4])
    assert gathers == [4] * layers  # two blocks of 8 tokens of each
    for _ in range(6):
        step(a=[3], b=[4])
    assert gathers == [4] * layers
    step(a=[3], b=[4])
    assert gathers == [4] * layers + [6] * layers
    step(a=[3])
    assert gathers[2 * layers :] == [3] * layers


def test_a_step_that_broke_off_leaves_nothing_half_kept(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that did not come to their turn have the rows of the step before it alone."""
    ways = TwoWays(tiny_model("llama"))
    ways.step(a=[1, 2, 3], b=[4, 5])
    ways.step(a=[6], b=[7])
    write = LayerPages.write
    calls = 0

    def breaks(self: LayerPages, *others: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise RuntimeError("no more")
        write(self, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerPages, "write", breaks)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more"):
            ways.step(a=[8], b=[9])
    monkeypatch.undo()
    ways.go_back("a", 2)
    ways.go_back("b", 2)
    ways.step(a=[10], b=[11])
    ways.step(a=[12], b=[13])


def beside(model: PagedModel) -> ModelRunner:
    """Another runner over the same pages: what it computes comes to the model's own from elsewhere,
    as over a transfer.
    """
    return ModelRunner(model.loaded, model.plan, model.storage, network=model.runner._network)


def test_a_rehearsal_leaves_no_name_behind(tiny_model: TinyModel) -> None:
    """The engine counts its sequences from the beginning, as the rehearsal did."""
    model, plain = (PagedModel(tiny_model("llama")) for _ in range(2))
    elsewhere = beside(model)
    executor = ModelExecutor(model.runner, torch.device("cpu"))

    def rehearsed(tokens: list[int]) -> Slice:
        piece = model.slice("rehearsal", tokens)
        return Slice(1, piece.tokens, piece.start, piece.block_tables, (DRAW,))

    executor.rehearse([rehearsed([1, 2, 3])])
    executor.rehearse([rehearsed([4])])
    # The first step of a sequence whose pages were received is a decode, at the same place.
    elsewhere.forward([model.slice("received", [7, 8, 9, 10])])
    plain.feed(received=[7, 8, 9, 10])
    piece = model.slice("received", [11])._replace(owner=1)
    expected = plain.feed(received=[11])
    torch.testing.assert_close(model.runner.forward([piece]), expected, atol=1e-5, rtol=1e-5)


def test_a_token_that_came_from_elsewhere_is_seen(tiny_model: TinyModel) -> None:
    model, plain = (PagedModel(tiny_model("llama")) for _ in range(2))
    elsewhere = beside(model)
    plain.feed(a=[1, 2])
    plain.feed(a=[3])
    plain.feed(a=[4])
    model.runner.forward([model.slice("a", [1, 2])])
    model.runner.forward([model.slice("a", [3])._replace(owner=1)])
    elsewhere.forward([model.slice("a", [4])])
    found = model.runner.forward([model.slice("a", [5])._replace(owner=1)])
    torch.testing.assert_close(found, plain.feed(a=[5]), atol=1e-5, rtol=1e-5)


def bucket_of(pieces: list[SequenceSlice], width: int) -> DecodeBucket:
    slots = torch.zeros(len(pieces) * width, dtype=torch.int64)
    return DecodeBucket(slice(0, len(pieces)), slots, width, None, 0, 0)


def piece_of(owner: int, start: int) -> SequenceSlice:
    return SequenceSlice(np.zeros(1, np.int32), start, (), wants_logits=True, owner=owner)


def test_what_is_kept_has_a_limit() -> None:
    kept = KeptKeys(limit_bytes=1000)
    small, large = [piece_of(1, 5)], [piece_of(2, 5), piece_of(3, 5)]
    for _ in range(3):
        kept.begin()
        assert kept.bucket(0, bucket_of(large, 4), large, 100) is not None
        assert kept.bucket(0, bucket_of(small, 4), small, 100) is None
        assert kept.bucket(0, bucket_of(small, 2), small, 100) is not None
        assert kept.bucket(1, bucket_of(small, 1), small, 100) is None


def test_an_unnamed_sequence_is_not_kept() -> None:
    kept = KeptKeys()
    kept.begin()
    pieces = [piece_of(1, 5), piece_of(-1, 5)]
    assert kept.bucket(0, bucket_of(pieces, 1), pieces, 100) is None


def test_memory_of_one_step_ago_is_dropped(tiny_model: TinyModel, gathers: list[int]) -> None:
    """Sequences that did not decode may have gone, their memory with them."""
    model = PagedModel(tiny_model("llama"))
    backend = model.runner._backend
    assert isinstance(backend, TorchBackend)
    model.runner.forward([model.slice("a", [1, 2])._replace(owner=1)])
    model.runner.forward([model.slice("a", [3])._replace(owner=1)])
    assert len(backend._kept._next) == 1
    model.runner.forward([model.slice("b", [1, 2])._replace(owner=2)])
    assert not backend._kept._next
    before = len(gathers)
    model.runner.forward([model.slice("a", [3])._replace(owner=1)])
    assert len(gathers) == before + len(model.loaded.specs)
