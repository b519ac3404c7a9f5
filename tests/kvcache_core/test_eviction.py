"""The eviction queue against plain lists, with more entries than lie together."""

from __future__ import annotations

import numpy as np

from kvcache_core.eviction import CHUNK, NOT_CACHED, SLACK, EvictionQueue

PAGES = 2 * CHUNK


def test_the_next_pages_to_lose_are_those_of_a_plain_list() -> None:
    rng = np.random.default_rng(7)
    stamps = np.full(PAGES, NOT_CACHED, dtype=np.int64)
    queue = EvictionQueue(stamps)
    levels: dict[int, list[int]] = {1: [], 2: []}
    for step in range(120):
        uncached = np.flatnonzero(stamps == NOT_CACHED)
        fresh = rng.permutation(uncached)[: int(rng.integers(0, 700))]
        priorities = rng.integers(1, 3, len(fresh), dtype=np.uint8)
        if step % 2:
            priorities[:] = 1
        queue.push(fresh, priorities)
        for priority, level in levels.items():
            level.extend(fresh[priorities == priority].tolist())
        cached = np.flatnonzero(stamps != NOT_CACHED)
        used = rng.permutation(cached)[: int(rng.integers(0, 300))]
        queue.remove(used)
        again = set(used.tolist())
        levels = {p: [page for page in level if page not in again] for p, level in levels.items()}
        level = levels[1] or levels[2]
        if level:
            count = int(rng.integers(1, 400))
            lost = queue.first(count)
            assert lost.tolist() == level[:count] == queue.first(count).tolist()
            queue.remove(lost)
            del level[:count]
        assert queue.count == len(levels[1]) + len(levels[2])
    assert queue.ordered() == levels[1] + levels[2]


def test_what_was_handed_out_stays_when_used_pages_are_swept_out() -> None:
    stamps = np.full(PAGES, NOT_CACHED, dtype=np.int64)
    queue = EvictionQueue(stamps)
    pages = np.arange(256, dtype=np.intp)
    low = np.ones(len(pages), dtype=np.uint8)
    queue.push(pages[128:], low[128:])
    first = queue.first(4)
    for _ in range(SLACK // 128 + 4):
        queue.push(pages[:128], low[:128])
        queue.remove(pages[:128])
    queue.push(pages[:128], low[:128])
    assert first.tolist() == [128, 129, 130, 131]
    assert queue.ordered() == [*range(128, 256), *range(128)]
    assert queue.first(256).tolist() == queue.ordered()
