"""Agreement of ranks: completed on all, failed or cancelled on any, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from transfer.consensus import (
    RankGroup,
    TransferFacts,
    agree,
    can_probe,
    poll,
    poll_probed,
)
from transfer.rank_info import ParallelShape

IDS = ("a", "b", "c")
ENDS = st.sampled_from(["pending", "completed", "failed", "cancelled"])


def facts(**ends: str) -> TransferFacts:
    def of(end: str) -> frozenset[str]:
        return frozenset(name for name, one in ends.items() if one == end)

    return TransferFacts(of("completed"), of("failed"), of("cancelled"))


class Lockstep(RankGroup):
    """One rank's end of a group of threads. Ranks that do not make the same call break it."""

    def __init__(self, shared: dict[str, Any], rank: int) -> None:
        self._shared, self._rank = shared, rank
        self.calls: list[str] = []

    @override
    def gather_count(self, value: int) -> Sequence[int]:
        return self._gather("count", value)

    @override
    def gather_facts(self, facts: TransferFacts) -> Sequence[TransferFacts]:
        return self._gather("facts", facts)

    def _gather(self, call: str, value: Any) -> list[Any]:
        self.calls.append(call)
        self._shared["values"][self._rank] = (call, value)
        self._shared["barrier"].wait(5)
        values = list(self._shared["values"])
        self._shared["barrier"].wait(5)
        assert {name for name, _ in values} == {call}
        return [value for _, value in values]


def on_all_ranks(
    count: int, work: Callable[[Lockstep, int], TransferFacts]
) -> tuple[list[TransferFacts], list[list[str]]]:
    shared: dict[str, Any] = {"values": [None] * count, "barrier": threading.Barrier(count)}
    groups = [Lockstep(shared, rank) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(work, groups, range(count)))
    return found, [group.calls for group in groups]


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(IDS, ENDS)), min_size=1, max_size=5))
def test_every_request_ends_as_its_ranks_say(ranks: list[dict[str, str]]) -> None:
    agreed = agree([facts(**ends) for ends in ranks])
    for name in IDS:
        ends = {rank[name] for rank in ranks}
        assert (name in agreed.failed) == ("failed" in ends)
        assert (name in agreed.cancelled) == ("cancelled" in ends and "failed" not in ends)
        assert (name in agreed.completed) == (ends == {"completed"})


def test_ranks_poll_to_one_answer() -> None:
    ends = [facts(a="completed", b="completed"), facts(a="completed", b="failed", c="completed")]
    found, calls = on_all_ranks(2, lambda group, rank: poll(group, ends[rank]))
    assert found == [facts(a="completed", b="failed")] * 2
    assert calls == [["facts"]] * 2


def test_idle_ranks_exchange_one_integer() -> None:
    found, calls = on_all_ranks(4, lambda group, _: poll_probed(group, 0, facts()))
    assert found == [TransferFacts()] * 4
    assert calls == [["count"]] * 4


def test_one_open_session_brings_every_rank_into_the_full_poll() -> None:
    """Also the ranks that have none themselves, such as those that hold no block of a request."""
    ends = [facts(a="completed"), facts(a="completed"), facts(a="failed")]
    found, calls = on_all_ranks(
        3, lambda group, rank: poll_probed(group, int(rank == 2), ends[rank])
    )
    assert found == [facts(a="failed")] * 3
    assert calls == [["count", "facts"]] * 3


@pytest.mark.parametrize(
    ("shape", "world", "expected"),
    [
        (ParallelShape(cp_size=2), 2, True),
        (ParallelShape(tp_size=2, cp_size=4), 8, True),
        (ParallelShape(tp_size=2, cp_size=4), 16, False),
        (ParallelShape(tp_size=4), 4, False),
        (ParallelShape(cp_size=2, pp_size=2), 4, False),
        (ParallelShape(tp_size=2, dp_size=2, cp_size=2), 4, False),
    ],
)
def test_who_may_probe(shape: ParallelShape, world: int, *, expected: bool) -> None:
    assert can_probe(shape, world) is expected
