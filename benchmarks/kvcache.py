"""``python -m benchmarks.kvcache``: what the KV cache manager costs, beside a plain dict-based one.

Thread CPU time; prompts are int32 arrays of 512 blocks of 64 tokens; target layers with full
attention and windowed draft layers in two pool groups. At each size the caches are full: a request
("miss", request_32k_us) matches nothing, allocates 512 blocks by evicting as many, and commits
them; while slots are still free it is called "free", the same prompt again is a "hit". Block keys
are computed once, outside of the request, as a server does. Both sides get the same prompts, one
side after the other, so that neither's objects slow the other's collections. Bytes a block come
from tracemalloc in a run of their own, arrays included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from benchmarks import options, report
from benchmarks.kvcache_reference import ReferenceCache, export_tables
from kvcache_core.hashing import Prompt, prefix_keys
from kvcache_core.index_space import IndexKind, IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier, SlotArray
from kvcache_core.spec import (
    BufferRole,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    ReusePolicy,
)
from kvcache_core.table_export import TableExporter

SCOPE = b"benchmark"
TOKENS_PER_BLOCK = 64
PROMPT_BLOCKS = 512
PROMPT_TOKENS = PROMPT_BLOCKS * TOKENS_PER_BLOCK
DRAFT_WINDOW = 2048
DRAFT_WINDOW_BLOCKS = DRAFT_WINDOW // TOKENS_PER_BLOCK + 1
VOCABULARY = 128_000
RUNNING = 64
"""Sequences that decode while collections are watched."""

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Request:
    """Tokens, and the same as a prompt whose blocks all have their keys already."""

    tokens: TokenArray
    prompt: Prompt

    @classmethod
    def of(cls, tokens: TokenArray) -> Request:
        """The request for these tokens; hashes them."""
        prompt = Prompt(SCOPE, tokens, TOKENS_PER_BLOCK)
        prompt.keys(prompt.blocks)
        return cls(tokens, prompt)

    @classmethod
    def make(cls, number: int, tokens: int = PROMPT_TOKENS) -> Request:
        """A request that shares no block with one of another number."""
        values = np.random.default_rng(number).integers(0, VOCABULARY, tokens, dtype=np.int32)
        return cls.of(values)


class CachedSequence(Protocol):
    """What the benchmark asks of a sequence, of either cache."""

    @property
    def matched_tokens(self) -> int: ...
    def grow(self, capacity: int) -> bool: ...
    def advance(self, history: int) -> None: ...
    def commit(self, tokens: TokenArray) -> None: ...
    def close(self) -> None: ...


class Cache(Protocol):
    """One side of the comparison."""

    def open(self, request: Request) -> CachedSequence:
        """Match all of a request's tokens but the last."""
        ...

    def cached_blocks(self) -> int: ...


class NoCopies(PageCopier):
    """There are no bytes behind the slots."""

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        return

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        return

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        return


def plan() -> LayoutPlan:
    """Two owners, two life cycles, two pool groups."""
    target = [
        KVCacheLayerSpec(
            layer_id=number,
            owner=KVCacheLayerOwner.TARGET,
            dtype=ElementType.BFLOAT16,
            num_kv_heads=8,
            head_dim=128,
        )
        for number in range(2)
    ]
    draft = KVCacheLayerSpec(
        layer_id=2,
        owner=KVCacheLayerOwner.DRAFT,
        dtype=ElementType.BFLOAT16,
        num_kv_heads=4,
        head_dim=64,
        window=DRAFT_WINDOW,
        policy=ReusePolicy.OPTIONAL,
    )
    return LayoutPlan.derive([*target, draft], tokens_per_block=TOKENS_PER_BLOCK)


def slots_for(blocks: int) -> tuple[int, int]:
    """Slots with which ``blocks`` target blocks fill the cache, draft windows in proportion."""
    prompts = -(-blocks // PROMPT_BLOCKS)
    return blocks, prompts * (DRAFT_WINDOW_BLOCKS + 1) + 2 * PROMPT_BLOCKS


class Unified(Cache):
    """The manager under test."""

    def __init__(self, blocks: int) -> None:
        self._manager = UnifiedKVCacheManager(
            plan(), slots_for(blocks), NoCopies(), incarnation="benchmark@0"
        )

    @override
    def open(self, request: Request) -> CachedSequence:
        return self._manager.open_prompt(request.prompt, max_match=len(request.tokens) - 1)

    @override
    def cached_blocks(self) -> int:
        return self._manager.cached_blocks()


class Reference(Cache):
    """The dict-based one."""

    def __init__(self, blocks: int) -> None:
        windows = (None, DRAFT_WINDOW_BLOCKS)
        self._cache = ReferenceCache(SCOPE, slots_for(blocks), windows, TOKENS_PER_BLOCK)

    @override
    def open(self, request: Request) -> CachedSequence:
        keys = request.prompt.known
        return self._cache.open(keys, max_match=len(request.tokens) - 1)

    @override
    def cached_blocks(self) -> int:
        return self._cache.cached_blocks()


SIDES: dict[str, Callable[[int], Cache]] = {"pageferry": Unified, "reference": Reference}


def cpu_us(action: Callable[[], object]) -> float:
    """Thread CPU time of one call, in microseconds."""
    start = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - start) / 1e3


def serve(cache: Cache, request: Request) -> CachedSequence:
    """Match, allocate and commit one prompt."""
    sequence = cache.open(request)
    if not sequence.grow(len(request.tokens)):
        raise RuntimeError("the cache is too small for one prompt")
    sequence.advance(len(request.tokens))
    sequence.commit(request.tokens[sequence.matched_tokens :])
    return sequence


def fill(cache: Cache, blocks: int) -> float:
    """Serve and close prompts until ``blocks`` are cached; the median of the last ten, in us."""
    spent = []
    taken: list[CachedSequence] = []
    for number in range(blocks // PROMPT_BLOCKS):
        request = Request.make(number)
        spent.append(cpu_us(lambda: taken.append(serve(cache, request))))  # noqa: B023
        taken.pop().close()
    serve(cache, Request.make(-(-blocks // PROMPT_BLOCKS))).close()
    return statistics.median(spent[-10:])


@dataclass(frozen=True)
class Timing:
    """Microseconds of thread CPU time, medians."""

    miss_us: float
    hit_us: float
    close_us: float


def time_requests(cache: Cache, blocks: int, repeats: int) -> Timing:
    """Requests on the full cache: prompts that are new, then the same ones again."""
    first = -(-blocks // PROMPT_BLOCKS) + 1_000_000
    requests = [Request.make(first + number) for number in range(min(repeats, blocks // 1024))]
    taken: list[CachedSequence] = []
    miss, hit, close = [], [], []
    for request in requests:
        miss.append(cpu_us(lambda: taken.append(serve(cache, request))))  # noqa: B023
        close.append(cpu_us(taken.pop().close))
    for request in requests:
        hit.append(cpu_us(lambda: taken.append(serve(cache, request))))  # noqa: B023
        if taken[-1].matched_tokens < PROMPT_TOKENS - TOKENS_PER_BLOCK:
            raise RuntimeError(f"only {taken[-1].matched_tokens} tokens of a cached prompt matched")
        taken.pop().close()
    return Timing(statistics.median(miss), statistics.median(hit), statistics.median(close))


@contextmanager
def collections() -> Iterator[list[float]]:
    """Thread CPU time of each garbage collection inside, in milliseconds."""
    pauses: list[float] = []
    started = [0]

    def watch(phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            started[0] = time.thread_time_ns()
        else:
            pauses.append((time.thread_time_ns() - started[0]) / 1e6)

    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)


def longest_pause_ms(cache: Cache, steps: int) -> float:
    """The longest collection while RUNNING sequences decode ``steps`` tokens each.

    Half way through one full collection is forced: a short loop might not meet one by itself.
    """
    requests = [Request.make(2_000_000 + number, TOKENS_PER_BLOCK) for number in range(RUNNING)]
    sequences = [serve(cache, request) for request in requests]
    token = np.array([1], dtype=np.int32)
    with collections() as pauses:
        for step in range(steps):
            length = TOKENS_PER_BLOCK + step + 1
            made = []
            for number, sequence in enumerate(sequences):
                if not sequence.grow(length):
                    raise RuntimeError("the cache is too small for the decoding sequences")
                sequence.advance(length)
                sequence.commit(token)
                made.append({"request": number, "tokens": [step], "index": (step, number)})
            if step == steps // 2:
                gc.collect()
    for sequence in sequences:
        sequence.close()
    return max(pauses)


def bytes_per_block(make: Callable[[int], Cache], blocks: int) -> float:
    """Python and numpy memory of a full cache over its cached blocks."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = make(blocks)
        fill(cache, blocks)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / cache.cached_blocks()
    finally:
        tracemalloc.stop()


def time_hash(repeats: int) -> float:
    """Keys of one prompt."""
    tokens = Request.make(0).tokens
    return statistics.median(
        cpu_us(lambda: prefix_keys(SCOPE, tokens, TOKENS_PER_BLOCK)) for _ in range(repeats)
    )


def time_export(repeats: int) -> dict[str, float]:
    """256 rows of 512 blocks for the draft layer's kernels, by side."""
    address = plan().address(2, BufferRole.VALUE)
    space = IndexSpace.of(address, IndexKind.PER_LAYER)
    tables = [
        np.arange(row * PROMPT_BLOCKS, (row + 1) * PROMPT_BLOCKS, dtype=np.int32)
        for row in range(256)
    ]
    exporter = TableExporter.allocate(space, 256, PROMPT_BLOCKS)
    plain = np.zeros_like(exporter.out)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(cpu_us(lambda: exporter.export(tables)))
        theirs.append(cpu_us(lambda: export_tables(tables, space.scale, space.bias, plain)))
    if not np.array_equal(plain, exporter.out):
        raise RuntimeError("the two exports differ")
    return {"pageferry": statistics.median(ours), "reference": statistics.median(theirs)}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The figures of each side, without the export's."""
    gc.collect()
    gc.freeze()
    figures: dict[str, dict[str, Any]] = {}
    print(
        f"{'side':<10} {'blocks':>9} {'free us':>9} {'miss us':>9} {'hit us':>9} {'close us':>9} "
        f"{'gc pause ms':>12}"
    )
    for name, make in SIDES.items():
        by_size: dict[int, Timing] = {}
        pause = 0.0
        for blocks in sorted(arguments.sizes):
            cache = make(blocks)
            free_us = fill(cache, blocks)
            timing = by_size[blocks] = time_requests(cache, blocks, arguments.repeats)
            paused = longest_pause_ms(cache, arguments.steps)
            pause = max(pause, paused)
            del cache
            gc.collect()
            print(
                f"{name:<10} {blocks:>9} {free_us:>9.0f} {timing.miss_us:>9.0f} "
                f"{timing.hit_us:>9.0f} {timing.close_us:>9.0f} {paused:>12.2f}",
                flush=True,
            )
        smallest, largest = by_size[min(by_size)], by_size[max(by_size)]
        traced = bytes_per_block(make, arguments.memory_blocks)
        print(f"{name:<10} {traced:.0f} bytes a block (tracemalloc, {arguments.memory_blocks})")
        figures[name] = {
            "request_32k_us": round(largest.miss_us, 1),
            "bytes_per_block": round(traced, 1),
            "scaling_1m_over_10k": round(largest.miss_us / smallest.miss_us, 3),
            "gc_pause_ms": round(pause, 3),
        }
    gc.unfreeze()
    return figures


def main() -> None:
    parser = options.parser("kvcache", __doc__)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="cached blocks; request_32k_us is that of the largest, scaling largest over smallest",
    )
    parser.add_argument("--repeats", type=int, default=40, help="requests of each kind and size")
    parser.add_argument("--steps", type=int, default=400, help="decode steps watched for pauses")
    parser.add_argument(
        "--memory-blocks", type=int, default=100_000, help="blocks of the run under tracemalloc"
    )
    arguments = parser.parse_args()
    if min(arguments.sizes) < 4 * PROMPT_BLOCKS:
        parser.error(f"a cache needs at least {4 * PROMPT_BLOCKS} blocks")
    hashed = time_hash(arguments.repeats)
    export = time_export(arguments.repeats)
    print(f"hash {hashed:.0f} us; table export {export['pageferry']:.0f} us", flush=True)
    figures = measure(arguments)
    exported = {side: round(value, 1) for side, value in export.items()}
    report.finish(
        {
            "hash_32k_us": round(hashed, 1),
            **figures["pageferry"],
            "table_export_us_256x512": exported["pageferry"],
            "reference": {
                **figures["reference"],
                "table_export_us_256x512": exported["reference"],
            },
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
