"""Small parts of the engine: transition tables, memories, leases, demand, log, admission."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core.manager import UnifiedKVCacheManager
from tests.support.fake_executor import FakeMemory
from tests.support.sim_engines import SCOPE, VOCAB, fake_plan, generate, prefill
from worker.admission import Bounds, Rejected, check
from worker.counters import Heartbeat
from worker.demand import PageDemand
from worker.inbox import Inbox, Shutdown
from worker.leases import LeaseBook
from worker.messages import SamplingParams
from worker.oplog import LOG_CODEC, GrowSequence, LogEntries, RanksDiverged
from worker.ports import Slice
from worker.ranks import RankManager
from worker.recording import LeaderManager
from worker.remembered import Remembered
from worker.replica import RankReplica
from worker.requests import (
    LEG_TRANSITIONS,
    SEQUENCE_TRANSITIONS,
    LegState,
    SequenceState,
    TokenList,
)


def test_every_state_can_end_and_the_end_is_final() -> None:
    assert set(LEG_TRANSITIONS) == set(LegState)
    assert set(SEQUENCE_TRANSITIONS) == set(SequenceState)
    for state in LegState:
        assert (LegState.ENDED in LEG_TRANSITIONS[state]) == (state is not LegState.ENDED)
    for sequence in SequenceState:
        final = sequence is SequenceState.FINISHED
        assert (SequenceState.FINISHED in SEQUENCE_TRANSITIONS[sequence]) != final


@given(st.lists(st.integers(0, 10**6)), st.lists(st.integers(0, 10**6), max_size=60))
def test_a_token_list_is_a_list(first: list[int], more: list[int]) -> None:
    tokens = TokenList(first)
    for token in more:
        tokens.append(token)
    assert tokens.span(0, len(tokens)).tolist() == first + more
    with pytest.raises(IndexError):
        tokens.span(0, len(tokens) + 1)


def test_what_is_remembered_is_bounded_in_number_and_time() -> None:
    memory = Remembered[int](limit=2, lifetime_ms=100)
    assert memory.put("a", 1, 0) == []
    assert memory.put("b", 2, 50) == []
    assert memory.put("c", 3, 60) == ["a"]
    assert memory.take("a") is None
    assert memory.next_expiry_ms() == 150
    assert memory.expire(149) == []
    assert memory.expire(150) == ["b"]
    assert memory.take("c") == 3
    assert len(memory) == 0
    assert memory.next_expiry_ms() is None


def test_an_idle_engine_has_no_age_and_a_busy_one_grows_old() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.age_ms(500) == 0
    heartbeat.busy(500)
    assert heartbeat.age_ms(900) == 400
    heartbeat.idle()
    assert heartbeat.age_ms(900) == 0


def test_the_inbox_wakes_up_for_what_comes_and_for_time() -> None:
    inbox = Inbox()
    assert inbox.wait(1) == []
    inbox.put(Shutdown("now"))
    assert inbox.wait(None) == [Shutdown("now")]
    assert inbox.take() == []


def pages(slots: int = 16) -> UnifiedKVCacheManager:
    plan = fake_plan()
    return UnifiedKVCacheManager(plan, [slots], FakeMemory(plan, [slots]), incarnation="w")


def test_a_lease_in_doubt_is_quarantined_and_comes_home_later() -> None:
    manager = pages()
    book = LeaseBook(RankManager(manager))
    cache = manager.open(SCOPE, [1, 2, 3, 4, 5], max_match=0)
    assert cache.grow(5)
    lease = cache.lease(0, 2)
    book.add(lease, 2)
    cache.close()
    book.in_doubt(lease)
    book.in_doubt(lease)
    assert book.quarantined_blocks == 2
    assert RankManager(manager).total_slots() == (14,)
    book.ended(lease)
    assert (book.quarantined_blocks, book.outstanding) == (0, 0)
    manager.check()
    assert manager.available_blocks() == 16
    with pytest.raises(KeyError):
        book.ended(lease)


@given(st.integers(1, 64))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(slots: int) -> None:
    plan = fake_plan(None, 6)
    demand = PageDemand(plan, max_chunk_tokens=8)
    total = (slots,) * len(plan.pool_groups)
    longest = demand.longest(total)
    assert all(need <= slots for need in demand.peak(longest)) or longest == 0
    assert any(need > slots for need in demand.peak(longest + 1))


def test_a_shipped_prompt_holds_what_its_windows_have_passed_up_to_half_of_the_pool() -> None:
    demand = PageDemand(fake_plan(None, 6), max_chunk_tokens=8)
    # Ten blocks with full attention; behind a window of six tokens two, and three for a chunk.
    assert demand.peak(40) == (15,)
    assert demand.shipped(40, (48,)) == (20,)
    assert demand.shipped(40, (8,)) == (19,)
    assert demand.shipped(20, (48,)) == demand.peak(20) == (10,)


def test_a_follower_that_differs_is_noticed_a_step_late() -> None:
    leader_pages, replica = pages(), RankReplica(pages())
    leader = LeaderManager(leader_pages, [replica])
    tokens = np.arange(6, dtype=np.int32)
    cache = leader.open(SCOPE, tokens, max_match=5)
    assert cache.grow(6)
    step = [Slice(cache.name, tokens, 0, cache.block_tables(), ())]
    leader.run_step(1, step)
    assert np.array_equal(replica.tables(cache.name)[0], cache.block_tables()[0])
    moved = (cache.block_tables()[0] + 1,)
    leader.run_step(2, [Slice(cache.name, tokens, 0, moved, ())])
    with pytest.raises(RanksDiverged, match="step 2"):
        leader.run_step(3, step)


def test_a_follower_notices_gaps_and_other_outcomes() -> None:
    replica = RankReplica(pages())
    with pytest.raises(RanksDiverged, match="expected number 1, got 2"):
        replica.apply(LogEntries(first_number=2, operations=()))
    leader = LeaderManager(pages(), [replica])
    cache = leader.open(SCOPE, np.arange(6, dtype=np.int32), max_match=5)
    leader.run_step(1, [])
    wrong = GrowSequence(sequence=cache.name, capacity=8, granted=False)
    with pytest.raises(RanksDiverged, match="the leader got False, this rank True"):
        replica.apply(LogEntries(first_number=3, operations=(wrong,)))


def test_the_log_crosses_a_wire() -> None:
    entries = LogEntries(
        first_number=7, operations=(GrowSequence(sequence=1, capacity=8, granted=True),)
    )
    assert LOG_CODEC.decode(LOG_CODEC.encode(entries)) == entries


BOUNDS = Bounds(max_sequence_tokens=32, vocab_size=VOCAB, max_choices=4)


def test_an_accepted_request_is_cut_to_what_fits() -> None:
    checked = check(generate("r", list(range(30)), max_tokens=50), BOUNDS)
    assert (len(checked.prompt), checked.output_limit) == (30, 2)
    assert check(prefill("r", [1], None, n=3), BOUNDS).emitted[2].tolist() == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"temperature": -1.0}, "invalid_sampling"),
        ({"temperature": math.nan}, "invalid_sampling"),
        ({"top_p": 1.5}, "invalid_sampling"),
        ({"min_p": -0.1}, "invalid_sampling"),
        ({"top_k": -1}, "invalid_sampling"),
        ({"seed": -1}, "invalid_sampling"),
        ({"repetition_penalty": 0.0}, "invalid_sampling"),
        ({"logprobs": 1000}, "invalid_sampling"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "invalid_sampling"),
        ({"logit_bias": ((1, math.nan),)}, "invalid_sampling"),
    ],
)
def test_sampling_parameters_are_checked(changes: dict[str, object], code: str) -> None:
    message = generate("r", [1, 2])
    params = SamplingParams.model_validate({**message.sampling.model_dump(), **changes})
    with pytest.raises(Rejected) as caught:
        check(message.model_copy(update={"sampling": params}), BOUNDS)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tokens": b"123"}, "invalid_tokens"),
        ({"emitted": (b"", b"")}, "invalid_emitted"),
        ({"emitted": (b"\x01\0\0\0" * 31,)}, "context_length_exceeded"),
        ({"finished": (1,)}, "invalid_choice"),
        ({"deadline_ms": 0}, "invalid_deadline"),
    ],
)
def test_the_rest_of_a_request_is_checked(changes: dict[str, object], code: str) -> None:
    message = generate("r", [1, 2]).model_copy(update=changes)
    with pytest.raises(Rejected) as caught:
        check(message, BOUNDS)
    assert caught.value.code == code
