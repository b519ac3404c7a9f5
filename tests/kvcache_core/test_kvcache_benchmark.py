"""benchmarks.kvcache drives both caches alike; its reference caches what the real one caches."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks import kvcache
from benchmarks.kvcache import TOKENS_PER_BLOCK, Cache, Reference, Request, Unified, serve
from benchmarks.kvcache_reference import export_tables

BLOCKS = 4 * kvcache.PROMPT_BLOCKS
FIGURES = {"request_32k_us", "bytes_per_block", "scaling_1m_over_10k", "gc_pause_ms"}


@pytest.fixture(params=[Unified, Reference])
def cache(request: pytest.FixtureRequest) -> Cache:
    made: Cache = request.param(BLOCKS)
    return made


def branch(trunk: Request, blocks: int, seed: int) -> Request:
    """A request that shares its first ``blocks`` blocks with ``trunk``."""
    tokens = Request.make(seed, len(trunk.tokens)).tokens
    tokens[: blocks * TOKENS_PER_BLOCK] = trunk.tokens[: blocks * TOKENS_PER_BLOCK]
    return Request.of(tokens)


def matched(cache: Cache, request: Request) -> int:
    """Whole blocks that a request matches."""
    sequence = serve(cache, request)
    blocks = sequence.matched_tokens // TOKENS_PER_BLOCK
    sequence.close()
    return blocks


def test_both_sides_match_the_same_prefixes(cache: Cache) -> None:
    first = Request.make(1)
    assert matched(cache, first) == 0
    assert matched(cache, first) == kvcache.PROMPT_BLOCKS - 1
    assert matched(cache, branch(first, 200, seed=2)) == 200
    assert matched(cache, branch(first, 300, seed=3)) == 300


def test_both_sides_forget_the_least_recently_used(cache: Cache) -> None:
    requests = [Request.make(number) for number in range(6)]
    for request in requests:
        assert matched(cache, request) == 0
    assert matched(cache, requests[5]) == kvcache.PROMPT_BLOCKS - 1
    assert matched(cache, requests[0]) == 0


def test_figures_of_a_tiny_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(sizes=[BLOCKS], repeats=3, steps=70, memory_blocks=BLOCKS)
    figures = kvcache.measure(arguments)
    assert set(figures) == {"pageferry", "reference"}
    for side in figures.values():
        assert set(side) == FIGURES
        assert all(value > 0 for value in side.values())
    assert str(BLOCKS) in capsys.readouterr().out
    assert set(kvcache.time_export(3)) == set(figures)


def test_the_reference_export_clears_what_is_missing() -> None:
    out = np.full((2, 4), 9, dtype=np.int32)
    export_tables([np.array([3, -1], dtype=np.int32)], 5, 2, out)
    assert out.tolist() == [[17, 0, 0, 0], [0, 0, 0, 0]]
