"""Decode steps in buckets over fixed memory, with kernels in Triton's interpreter and no graphs
where there is no CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.deferred_copies import DeferredCopies
from tests.worker.model.harness import PagedModel
from worker.model.backend import PagedLayers
from worker.model.capture import Body, Capture, CUDAGraphs, RunEachTime
from worker.model.decode import BUCKETS, DecodeLimits, DecodeRunner, Decoding, buckets_for
from worker.model.feed import TokenFeed
from worker.model.loader import LoadedModel
from worker.model.networks import FusedModel
from worker.model.runner import ModelRunner

kernel_layers: Any = pytest.importorskip("worker.model.kernel_layers", exc_type=ModuleNotFoundError)
triton_backend: Any = pytest.importorskip(
    "worker.model.triton_backend", exc_type=ModuleNotFoundError
)
# Rows that pad a batch hold anything, as on a device; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TinyModel = Callable[[str], Path]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = DecodeLimits((1, 4, 6), 64)


class CountingCapture(Capture):
    """Runs each time; keeps what was captured."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []

    @property
    def captured(self) -> int:
        return len(self.bodies)

    @override
    def __call__(self, body: Body) -> Body:
        self.bodies.append(body)
        return body


class Pair:
    """Two copies of a model: one decodes in buckets, the other as any batch."""

    def __init__(self, path: Path, capture: Capture | None = None) -> None:
        self.capture = CountingCapture()
        self._capture = capture or self.capture
        self.plain = PagedModel(path, device=DEVICE)
        self.bucketed = PagedModel(path, device=DEVICE, make_runner=self._runner)

    def _runner(self, loaded: LoadedModel, plan: LayoutPlan, storage: TorchStorage) -> ModelRunner:
        network = FusedModel(loaded, kernel_layers.KERNEL_PARTS)

        def decoding(layers: PagedLayers, feed: TokenFeed) -> DecodeRunner:
            over = triton_backend.TritonBackend(layers).over
            made = Decoding(network, over, self._capture, LIMITS)
            return DecodeRunner(layers.geometries, storage.device, made, feed)

        return ModelRunner(loaded, plan, storage, network, triton_backend.TritonBackend, decoding)

    def feed(self, **pieces: Sequence[int]) -> None:
        """The same step on both."""
        expected = self.plain.feed(**pieces)
        torch.testing.assert_close(self.bucketed.feed(**pieces), expected, atol=3e-3, rtol=0)


def test_decodes_equal_those_of_mixed_batches(tiny_model: TinyModel) -> None:
    pair = Pair(tiny_model("qwen2"))
    # a leaves qwen2's window, b begins a block at its first decode, c is one token long
    pair.feed(a=range(24), b=range(8), c=[5])
    assert pair.capture.captured == 0
    pair.feed(a=[1])
    pair.feed(a=[2], b=[3], c=[4])
    pair.feed(c=[7], a=[5], b=[6])
    assert pair.capture.captured == 2  # of 1 and of 4
    pair.feed(a=[1], d=range(5))  # mixed again, over what the buckets wrote
    pair.feed(**{name: [1] for name in "abcd"})
    assert pair.capture.captured == 2


def test_every_size_is_captured_beforehand_once(tiny_model: TinyModel) -> None:
    pair = Pair(tiny_model("llama"))
    for _ in range(2):
        pair.bucketed.runner.capture_decodes()
        assert pair.capture.captured == 3


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (3, (1, 2, 3)), (64, (*BUCKETS[:8], 64)), (900, BUCKETS)]
)
def test_buckets_end_at_the_most_sequences(most: int, expected: tuple[int, ...]) -> None:
    assert buckets_for(most) == expected


def test_what_is_not_wanted_is_left_out(tiny_model: TinyModel) -> None:
    pair = Pair(tiny_model("llama"))
    pair.feed(a=range(3), b=range(4))
    pieces = [
        [
            paged.slice("a", [1], wants_logits=False),
            paged.slice("b", [2]),
            paged.slice("c", [9], wants_logits=False),
        ]
        for paged in (pair.plain, pair.bucketed)
    ]
    expected = pair.plain.runner.forward(pieces[0])
    found = pair.bucketed.runner.forward(pieces[1])
    assert pair.capture.captured == 1
    torch.testing.assert_close(found, expected, atol=3e-3, rtol=0)


def test_padding_writes_nothing_and_tokens_come_from_the_step_before(tiny_model: TinyModel) -> None:
    pair = Pair(tiny_model("llama"))
    paged = pair.bucketed
    pair.feed(a=range(3), b=range(4))
    memory = [
        paged.storage.pool_bytes(group.id, pool)
        for group in paged.plan.pool_groups
        for pool in range(len(group.slot_bytes))
    ]
    own = {int(t) for n in "ab" for t in paged.slice(n, [1]).block_tables[0]}
    others = [slot for slot in range(len(memory[0])) if slot not in own]
    before = [pool[others].clone() for pool in memory]
    for name in "ab":
        paged.tokens[name].pop()
    paged.runner.feed.put(torch.tensor([7, 11, 13]))
    pieces = [paged.slice("a", [0])._replace(feed=2), paged.slice("b", [4])]
    found = paged.runner.forward(pieces)
    torch.testing.assert_close(found, pair.plain.feed(a=[13], b=[4]), atol=3e-3, rtol=0)
    assert pair.capture.captured == 1
    assert all(torch.equal(pool[others], kept) for pool, kept in zip(memory, before, strict=True))


def test_what_is_accepted(tiny_model: TinyModel) -> None:
    paged = PagedModel(tiny_model("llama"))
    geometries: Any = paged.runner._geometries
    nothing: Any = None
    decoding = Decoding(nothing, nothing, RunEachTime(), LIMITS)
    runner = DecodeRunner(geometries, torch.device("cpu"), decoding, paged.runner.feed)
    paged.slice("long", range(63))
    last, beyond = paged.slice("long", [1]), paged.slice("long", [1])
    singles = [paged.slice(str(i), [1]) for i in range(7)]
    assert runner.accepts([last])
    assert runner.accepts(singles[:6])
    assert not runner.accepts([])
    assert not runner.accepts(singles)
    assert not runner.accepts([beyond])
    assert not runner.accepts([singles[0], paged.slice("two", [1, 2])])
    assert runner.captured == ()


class DeferredSteps(Capture):
    """Queues every step behind the copies that were queued before it."""

    def __init__(self, queue: DeferredCopies) -> None:
        self._queue = queue
        self.results: list[list[float]] = []

    @override
    def __call__(self, body: Body) -> Body:
        def launch() -> torch.Tensor:
            self._queue.launch(lambda: self.results.append(body()[:, 0].tolist()))
            return torch.zeros(LIMITS.buckets[-1], 1)

        return launch


def tokens_and_positions(
    tokens: torch.Tensor, positions: torch.Tensor, _step: object, _rows: object
) -> torch.Tensor:
    """A network whose logits tell what it saw."""
    return (1000 * tokens + positions).float().unsqueeze(1)


def decode_runner(
    paged: PagedModel, capture: Capture, queue: DeferredCopies | None = None
) -> DecodeRunner:
    """Over a network that has no layers."""
    step: Any = lambda metadata: metadata  # noqa: E731
    network: Any = tokens_and_positions
    decoding = Decoding(network, step, capture, LIMITS)
    geometries: Any = paged.runner._geometries
    return DecodeRunner(geometries, paged.storage.device, decoding, paged.runner.feed, queue)


def test_b38_steps_that_are_queued_together_keep_their_own_values(tiny_model: TinyModel) -> None:
    paged, queue = PagedModel(tiny_model("llama")), DeferredCopies()
    steps = DeferredSteps(queue)
    runner = decode_runner(paged, steps, queue)
    for position in range(4):
        runner.forward([paged.slice("a", [7 + position])])
    assert steps.results == []
    queue.sync()
    assert steps.results == [[1000.0 * (7 + position) + position] for position in range(4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_b38_steps_that_a_late_device_has_not_begun_keep_their_own_values(
    tiny_model: TinyModel,
) -> None:
    paged = PagedModel(tiny_model("llama"), device="cuda")
    runner = decode_runner(paged, RunEachTime())
    runner.forward([paged.slice("a", [3])])
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    found = [runner.forward([paged.slice("a", [7 + n])]) for n in range(4)]
    assert [row.item() for row in found] == [1000.0 * (7 + n) + n + 1 for n in range(4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_captured_over_padding_compute_what_launches_do(tiny_model: TinyModel) -> None:
    """Several steps queued without waiting, each over the tokens that were put before it."""
    pair = Pair(tiny_model("qwen2"), CUDAGraphs(torch.device("cuda", 0)))
    runner = pair.bucketed.runner
    runner.capture_decodes()
    pair.feed(a=range(24), b=range(8), c=[5])
    found, expected = [], []
    for step in range(6):
        runner.feed.put(torch.tensor([step, 2 * step, 7], device="cuda"))
        pieces = [
            pair.bucketed.slice("a", [0])._replace(feed=1),
            pair.bucketed.slice("b", [3]),
            pair.bucketed.slice("c", [0])._replace(feed=0),
        ]
        found.append(runner.forward(pieces).clone())
        if step % 2:
            torch.cuda.synchronize()
        expected.append(pair.plain.feed(a=[2 * step], b=[3], c=[step]))
    torch.testing.assert_close(torch.stack(found).cpu(), torch.stack(expected), atol=3e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_its_inputs() -> None:
    device = torch.device("cuda", 0)
    source = torch.arange(4, device=device)
    capture = CUDAGraphs(device)
    launches = [capture(partial(torch.mul, source, factor)) for factor in (2, 3)]
    source.copy_(torch.arange(4) + 10)
    found = [launch().tolist() for launch in launches]
    assert found == [(np.arange(10, 14) * factor).tolist() for factor in (2, 3)]
