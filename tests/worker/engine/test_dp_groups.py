"""An engine of several dp groups: where requests come to live, and what one group's ranks say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from kvcache_core.hashing import Prompt
from tests.support.sim_engines import (
    SimWorker,
    SimWorld,
    WorkerShape,
    expected,
    generate,
    prefill,
    random_prompt,
)
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.identity import Incarnation
from transfer.messages import ChoiceHandoff, HandoffData
from transfer.outcome import Outcome
from transfer.prefix import Prefix
from worker.admission_planner import AdmissionPlanner, Candidate, RankLoad
from worker.engine import Engine
from worker.group_facts import group_fact_of
from worker.group_leading import GroupTransfers
from worker.inbox import FrontEndLost, RankReported
from worker.kv_balance import KV_BALANCE_MAX_SKIPPED_ROUNDS, KvBalance
from worker.messages import Cancel, Stop
from worker.oplog import RanksDiverged, StepChecksum
from worker.rank_facts import FACTS_CODEC, RankProgress
from worker.ranks import RankManager


class Never(AdmissionPlanner):
    """Places nobody; notes what it was asked."""

    def __init__(self) -> None:
        self.candidates: list[tuple[Candidate, ...]] = []
        self.groups: list[tuple[int, ...]] = []

    @override
    def window(self) -> int:
        return 2

    @override
    def plan(
        self,
        *,
        candidates: Sequence[Candidate],
        candidate_groups: Sequence[int],
        ranks: Sequence[RankLoad],
    ) -> Sequence[int | None]:
        self.candidates.append(tuple(candidates))
        self.groups.append(tuple(candidate_groups))
        return [None] * len(candidates)


def worker_of(world: SimWorld, planner: AdmissionPlanner | None = None) -> SimWorker:
    return world.worker("w", WorkerShape(dp_size=2, planner=planner, slots=24))


def homes(engine: Engine) -> dict[str, int]:
    """On which group each request lives."""
    return {leg.request_id: group.number for group in engine._groups for leg in group.desk.legs}


def test_requests_are_spread_and_everybody_steps() -> None:
    world = SimWorld(3)
    worker = worker_of(world)
    prompts = {f"r{count}": random_prompt(world.rng, 9 + count) for count in range(4)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt))
    world.step()
    assert sorted(homes(worker.engine).values()) == [0, 0, 1, 1]
    assert worker.gauges is not None
    assert worker.gauges.total_blocks == 48
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
        assert world.ended(worker, "generation", name).outcome == "succeeded"
    (rank,) = worker.ranks
    assert len(rank.partner.steps) == worker.gauges.steps_total
    assert all(own == rows.tokens[1] for own, rows in rank.partner.steps)


def test_a_group_without_work_takes_part_in_every_step() -> None:
    """Its part is empty: what a rank computes then is a dummy request (tests/worker/model)."""
    world = SimWorld(3)
    worker = worker_of(world)
    prompt = random_prompt(world.rng, 9)
    world.send(worker, generate("alone", prompt))
    world.drain()
    assert world.choices["alone", 0].tokens == expected(prompt)
    (rank,) = worker.ranks
    assert worker.gauges is not None
    assert len(rank.partner.steps) == worker.gauges.steps_total > 0
    assert {own for own, _ in rank.partner.steps} == {0}
    assert all(rows.tokens[0] > 0 for _, rows in rank.partner.steps)
    assert rank.manager.counters.pages_created == 0


def test_a_prompt_follows_its_prefix() -> None:
    world = SimWorld(3)
    worker = worker_of(world)
    first, other = random_prompt(world.rng, 17), random_prompt(world.rng, 25)
    world.send(worker, generate("first", first))
    world.send(worker, generate("other", other))
    world.step()
    assert homes(worker.engine) == {"first": 0, "other": 1}
    world.drain()
    world.send(worker, generate("other again", [*other, 1, 2, 3]))
    world.send(worker, generate("first again", [*first, 1, 2, 3]))
    world.step()
    assert homes(worker.engine) == {"first again": 0, "other again": 1}
    world.drain()
    assert world.started(worker, "generation", "other again").cached_tokens >= 24


def test_kv_balanced_admission_waits_for_room_but_not_for_ever() -> None:
    """Two that take a whole group, then one that fits nowhere until a group is free again."""
    world = SimWorld(3)
    worker = worker_of(world, KvBalance())
    prompts = {name: random_prompt(world.rng, 90) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt, max_tokens=4))
    world.step()
    assert homes(worker.engine) == {"a": 0, "b": 1}
    assert worker.gauges is not None
    assert worker.gauges.waiting >= 1
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt, max_tokens=4)


def test_a_planner_that_places_nobody_is_overruled() -> None:
    world = SimWorld(3)
    planner = Never()
    worker = worker_of(world, planner)
    prompts = {name: random_prompt(world.rng, 9) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt))
    world.drain()
    assert planner.groups[0] == (0, 0)  # served in order of arrival
    assert [[one.skipped for one in asked] for asked in planner.candidates[:2]] == [[0, 0], [1, 1]]
    skipped = max(one.skipped for asked in planner.candidates for one in asked)
    assert skipped == KV_BALANCE_MAX_SKIPPED_ROUNDS - 1
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)


def test_a_long_queue_is_not_looked_up_again_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round costs depends on the planner's window, not on who waits behind it."""
    world = SimWorld(3)
    planner = Never()
    worker = worker_of(world, planner)
    lookups: list[int] = []
    known = RankManager.known_tokens

    def counted(self: RankManager, prompt: Prompt) -> int:
        lookups.append(1)
        return known(self, prompt)

    monkeypatch.setattr(RankManager, "known_tokens", counted)
    prompts = {f"r{number}": random_prompt(world.rng, 9) for number in range(40)}
    for name, prompt in prompts.items():
        world.send(worker, generate(name, prompt))
    world.step()
    assert len(lookups) == 2 * planner.window() * len(planner.candidates)
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)


def test_what_is_said_of_requests_that_live_nowhere() -> None:
    """They are cancelled, stopped, asked for twice or forgotten by their front end."""
    world = SimWorld(3)
    worker = worker_of(world, Never())
    for name in ("cancelled", "stopped", "twice"):
        world.send(worker, generate(name, random_prompt(world.rng, 9)))
    world.send(worker, generate("forgotten", random_prompt(world.rng, 9)), connection=2)
    world.send(worker, Cancel(request_id="cancelled"))
    world.send(worker, Stop(request_id="stopped", choice=0, index=0))
    worker.inbox.append(FrontEndLost(2))
    world.step()
    world.send(worker, generate("twice", random_prompt(world.rng, 9)))
    world.step()
    assert world.ended(worker, "generation", "cancelled").outcome == "cancelled"
    assert world.ended(worker, "generation", "stopped").outcome == "succeeded"
    (rejected,) = world.legs["w", "generation", "twice"].ended
    assert (rejected.outcome, rejected.code) == ("rejected", "duplicate_request")
    assert set(homes(worker.engine)) == {"twice"}
    world.accepted.clear()
    world.drain()
    assert [one.outcome for one in world.legs["w", "generation", "twice"].ended] == [
        "rejected",
        "succeeded",
    ]
    assert ("w", "generation", "forgotten") not in world.legs


def test_a_late_cancel_finds_the_group_and_an_early_one_all_of_them() -> None:
    world = SimWorld(3)
    worker = worker_of(world)
    world.send(worker, Cancel(request_id="early"))
    world.step()
    for name in ("first", "early", "other", "late"):
        world.send(worker, generate(name, random_prompt(world.rng, 9), max_tokens=40))
    world.step()
    assert world.ended(worker, "generation", "early").outcome == "cancelled"
    assert homes(worker.engine) == {"first": 0, "other": 0, "late": 1}
    world.send(worker, Cancel(request_id="late"))
    world.drain()
    assert world.ended(worker, "generation", "late").outcome == "cancelled"


@pytest.mark.parametrize("tokens", [b"", b"\1\2\3", b"\xff\xff\xff\xff"])
def test_a_request_that_cannot_be_read_is_refused(tokens: bytes) -> None:
    world = SimWorld(3)
    worker = worker_of(world)
    world.send(worker, generate("odd", [1]).model_copy(update={"tokens": tokens}))
    world.drain()
    assert world.ended(worker, "generation", "odd").outcome == "rejected"


def test_a_context_leg_is_told_where_it_lives_before_anything_else() -> None:
    world = SimWorld(3)
    context, generation = worker_of(world), world.worker("g", WorkerShape(dp_size=2))
    prompts = {f"r{count}": random_prompt(world.rng, 9) for count in range(4)}
    for name, prompt in prompts.items():
        world.send(context, prefill(name, prompt, generation.incarnation))
        world.send(generation, generate(name, prompt, source=context.address))
    assert set(world.held) == set(prompts)
    world.drain()
    for name, prompt in prompts.items():
        assert world.choices[name, 0].tokens == expected(prompt)
        assert world.choices[name, 0].sources == ["w", *["g"] * 7]
        assert world.ended(generation, "generation", name).prefill_tokens == 0
    for worker in (context, generation):
        (rank,) = worker.ranks
        assert rank.manager.counters.pages_created > 0


def test_books_that_differ_from_the_pages_end_the_instance() -> None:
    world = SimWorld(3)
    worker = worker_of(world)
    for name in ("a", "b"):
        world.send(worker, generate(name, random_prompt(world.rng, 9)))
    (rank,) = worker.ranks
    tell = rank._tell

    def lie(message: Any) -> None:
        tell(StepChecksum(step=1, checksum=7) if isinstance(message, StepChecksum) else message)

    rank._follower._tell = lie
    with pytest.raises(RanksDiverged, match="step 1"):
        world.drain()


R = "request"
PEER = Incarnation(instance="peer", nonce="1")
DATA = HandoffData(choices=(ChoiceHandoff(token=3, logprob=None, finish=None),), cached_tokens=4)


class Log:
    """A log that nobody reads, in which every lease is called 7."""

    def record(self, operation: object) -> None:
        """Dropped."""

    def lease_name(self, lease: object) -> int:
        return 7


class Leased:
    """Stands for a lease."""


LEASE: Any = Leased()


@pytest.mark.parametrize(
    "event",
    [
        GrantReceived(R, PEER),
        AnnounceReceived(R),
        PrefixFoundReceived(R, 5),
        HandoffReceived(R, DATA),
        HandoffReceived(R, None),
        NoDecodeReceived(R),
        SessionEnded(R, Outcome.FAILED, "lost", 10, 2),
        SessionEnded(R, Outcome.CANCELLED, "", 0, 0),
        LeaseInDoubt(R, LEASE, "lost"),
        LeaseEnded(R, LEASE),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_engine_hears_what_the_other_ranks_agent_says(event: AgentEvent) -> None:
    transfers = GroupTransfers(Log())
    transfers.ship(R, 0, 1, LEASE)
    fact = group_fact_of(event, 7)
    assert fact is not None
    told = FACTS_CODEC.decode(FACTS_CODEC.encode(fact))
    assert transfers.heard(RankReported(1, told)) == (event,)  # type: ignore[arg-type]


def test_the_engine_hears_of_a_pull() -> None:
    event = PullReceived(R, PEER, Prefix(b"scope", np.arange(8, dtype=np.int32)), 2)
    fact = group_fact_of(event, 0)
    assert fact is not None
    told = FACTS_CODEC.decode(FACTS_CODEC.encode(fact))
    (heard,) = GroupTransfers(Log()).heard(RankReported(1, told))  # type: ignore[arg-type]
    assert isinstance(heard, PullReceived)
    assert (heard.request_id, heard.puller, heard.least_blocks) == (R, PEER, 2)
    assert heard.prefix.scope == b"scope"
    assert heard.prefix.tokens.tolist() == list(range(8))


def test_a_chunk_is_nobodys_business() -> None:
    assert group_fact_of(ChunkReceived(R, 3), 0) is None


def test_half_a_word_is_refused() -> None:
    """A rank that shares its requests with others says no more than how far it is."""
    said = RankReported(1, RankProgress(request_id=R, word="handed_off"))
    with pytest.raises(ValueError, match="says all of 'handed_off'"):
        GroupTransfers(Log()).heard(said)
