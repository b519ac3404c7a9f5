"""The router as a whole: rows R1 to R7, soft affinity, spreading, and what a placement leaves
behind.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.conversation import SPECIFIC_FAN_OUT, ConversationRouter, RouterSettings
from router.placement import (
    NoWorkerError,
    Placement,
    PlacementReason,
    PrefixHolder,
    RouteRequest,
)
from router.rules import LoadRule, RuleSettings
from router.snapshots import Role, WorkerSnapshot
from transfer.identity import Incarnation

BLOCK = 64


def worker(name: str, role: Role, **facts: bool | int | str) -> WorkerSnapshot:
    values: dict[str, object] = {
        "incarnation": Incarnation(instance=name, nonce=str(facts.pop("nonce", "0"))),
        "role": role,
        **facts,
    }
    return WorkerSnapshot(**values)  # type: ignore[arg-type]


def cluster(contexts: int, generations: int) -> list[WorkerSnapshot]:
    built = [worker(f"c{i}", "context") for i in range(contexts)]
    return built + [worker(f"g{i}", "generation") for i in range(generations)]


def keys(name: str, blocks: int, preamble: int = 0) -> tuple[bytes, ...]:
    """Block keys of a prompt that shares its first ``preamble`` blocks with every other one."""
    return tuple(
        (f"p{i}" if i < preamble else f"{name}{i}").encode().ljust(8, b".") for i in range(blocks)
    )


class Driver:
    """A router whose requests all succeed at once unless told otherwise."""

    def __init__(
        self,
        snapshots: list[WorkerSnapshot],
        rule: LoadRule,
        follow: str = "specific",
        min_match_tokens: int = 2 * BLOCK,
    ) -> None:
        rules = RuleSettings(rule=rule, min_match_tokens=min_match_tokens)
        settings = RouterSettings(
            rules=rules, new_conversation_follow=follow, local_prefill_tokens=0
        )
        self.router = ConversationRouter(settings)
        self.snapshots = snapshots
        self.count = 0

    def place(
        self,
        conversation: str | None,
        tokens: int,
        blocks: tuple[bytes, ...] = (),
        *,
        max_output_tokens: int = 10,
    ) -> Placement:
        self.count += 1
        request = RouteRequest(
            request_id=f"r{self.count}",
            prompt_tokens=tokens,
            keys=blocks,
            max_output_tokens=max_output_tokens,
            conversation_id=conversation,
        )
        placement = self.router.place(request, self.snapshots)
        assert self.router.place(request, self.snapshots) == placement, "place is pure"
        assert self.router.place(request, self.snapshots[::-1]) == placement, "order matters"
        self.router.reserve(placement, self.snapshots)
        return placement

    def prefilled(self, placement: Placement) -> None:
        self.router.release(placement.request.request_id, "prefill")
        self.router.succeeded(placement)

    def ended(self, placement: Placement) -> None:
        if placement.sequence is not None:
            self.router.release(placement.request.request_id, "sequence")
        self.router.ledger.check()

    def serve(
        self, conversation: str | None, tokens: int, blocks: tuple[bytes, ...] = ()
    ) -> Placement:
        placement = self.place(conversation, tokens, blocks)
        self.prefilled(placement)
        self.ended(placement)
        return placement


RULES = list(LoadRule)


@pytest.mark.parametrize("name", ["never", "", "Specific"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="NewConversationFollow"):
        RouterSettings(new_conversation_follow=name)


@st.composite
def snapshot_lists(draw: st.DrawFn) -> list[WorkerSnapshot]:
    roles = draw(
        st.lists(st.sampled_from(("context", "generation", "aggregated")), min_size=1, max_size=6)
    )
    return [
        WorkerSnapshot(
            incarnation=Incarnation(instance=f"w{i}", nonce="0"),
            role=role,  # type: ignore[arg-type]
            accepting=draw(st.booleans()),
            total_tokens=draw(st.sampled_from((0, 100, 100_000))),
        )
        for i, role in enumerate(roles)
    ]


@given(
    snapshot_lists(),
    st.sampled_from(RULES),
    st.sampled_from(("specific", "always")),
    st.lists(
        st.tuples(
            st.sampled_from((None, "a", "b")), st.integers(1, 500), st.booleans(), st.integers(1, 3)
        ),
        max_size=12,
    ),
)
def test_place_never_raises_and_ignores_the_order_of_workers(
    snapshots: list[WorkerSnapshot],
    rule: LoadRule,
    follow: str,
    requests: list[tuple[str | None, int, bool, int]],
) -> None:
    driver = Driver(snapshots, rule, follow)
    for conversation, tokens, succeeds, output in requests:
        blocks = keys(conversation or "x", tokens // BLOCK)
        placement = driver.place(conversation, tokens, blocks, max_output_tokens=output)
        assert driver.router.place_repair(placement.request, snapshots, None).generation is not None
        driver.snapshots = driver.snapshots[::-1]
        assert placement.context is not None or placement.generation is not None
        assert placement.context != placement.generation
        accepting = {entry.incarnation for entry in snapshots if entry.accepting}
        chosen = {placement.context, placement.generation} - {None}
        assert not accepting or chosen <= accepting
        if succeeds:
            driver.prefilled(placement)
        else:
            driver.router.release(placement.request.request_id, "prefill")
            driver.router.failed(placement.request.request_id)
        driver.ended(placement)
    driver.router.check()
    assert len(driver.router.ledger) == 0


def test_no_worker_at_all_is_the_only_error() -> None:
    router = ConversationRouter(RouterSettings())
    with pytest.raises(NoWorkerError):
        router.place(RouteRequest(request_id="r", prompt_tokens=1), [])


@pytest.mark.parametrize("rule", RULES)
def test_a_conversation_stays_on_its_workers(rule: LoadRule) -> None:
    driver = Driver(cluster(4, 3), rule)
    first = driver.serve("chat", 300, keys("chat", 4))
    for turn in range(2, 12):
        driver.serve(None, 50)
        placement = driver.serve("chat", 300 * turn, keys("chat", 300 * turn // BLOCK))
        assert placement.context == first.context
        assert placement.generation == first.generation
        assert placement.context_cached_tokens >= 300 * (turn - 1) - BLOCK


@pytest.mark.parametrize("rule", [LoadRule.LEAST_BACKLOG, LoadRule.ROUND_ROBIN])
def test_a_known_conversation_is_charged_its_growth_and_at_least_one_block(
    rule: LoadRule,
) -> None:
    driver = Driver(cluster(2, 1), rule)
    assert driver.serve("chat", 296).prefill.tokens == 296
    assert driver.serve("chat", 396).prefill.tokens == 100
    assert driver.serve("chat", 400).prefill.tokens == BLOCK
    assert driver.serve(None, 500).prefill.tokens == 500


def test_a_failed_first_request_does_not_make_its_retry_look_like_growth() -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    failed = driver.place("chat", 30_000)
    driver.router.release(failed.request.request_id, "prefill")
    driver.router.failed(failed.request.request_id)
    driver.ended(failed)
    assert driver.place("chat", 30_000).prefill.tokens == 30_000


def test_binding_comes_from_success_only_and_failure_unbinds() -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    first = driver.serve("chat", 100)
    second = driver.place("chat", 150)
    assert (second.context, second.reason) == (first.context, PlacementReason.BOUND)
    driver.router.release(second.request.request_id, "prefill")
    driver.router.failed(second.request.request_id)
    driver.ended(second)
    busy = driver.place(None, 10_000)
    third = driver.place("chat", 150)
    assert third.reason is PlacementReason.LEAST_BACKLOG
    assert third.context != busy.context


def test_a_dead_worker_rebinds_once() -> None:
    driver = Driver(cluster(3, 1), LoadRule.LEAST_BACKLOG)
    first = driver.serve("chat", 300, keys("chat", 4))
    dead = first.context
    assert dead is not None
    driver.snapshots = [entry for entry in driver.snapshots if entry.incarnation != dead]
    driver.snapshots.append(worker(dead.instance, "context", nonce="1"))
    driver.router.lost(dead)
    second = driver.serve("chat", 350, keys("chat", 5))
    assert second.context != dead
    assert second.prefill.tokens == 350
    third = driver.serve("chat", 400, keys("chat", 6))
    assert third.context == second.context


def test_a_refusing_worker_loses_its_conversation_to_another() -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    first = driver.serve("chat", 300)
    driver.snapshots = [
        worker(entry.incarnation.instance, entry.role, accepting=entry.incarnation != first.context)
        for entry in driver.snapshots
    ]
    assert driver.serve("chat", 400).context != first.context


def test_a_hot_conversation_spills_when_its_worker_is_far_behind() -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    first = driver.serve("hot", 1000)
    chosen = Counter(driver.place("hot", 70_000 * (turn + 1)).context for turn in range(8))
    assert chosen[first.context] < 8


@pytest.mark.parametrize("follow", ["specific", "always"])
def test_a_new_conversation_follows_a_specific_prefix(follow: str) -> None:
    driver = Driver(cluster(4, 1), LoadRule.LEAST_BACKLOG, follow)
    first = driver.serve("a", 320, keys("doc", 5))
    driver.place(None, 10)
    joined = driver.serve("b", 400, (*keys("doc", 5), b"own....."))
    assert joined.context == first.context
    assert joined.reason is PlacementReason.FOLLOWED
    assert joined.prefill.tokens == 400 - 320


def test_a_short_match_is_not_followed() -> None:
    driver = Driver(cluster(4, 1), LoadRule.LEAST_BACKLOG)
    driver.serve("a", 100, keys("doc", 1))
    assert driver.serve("b", 100, keys("doc", 1)).reason is PlacementReason.LEAST_BACKLOG


def test_specific_spreads_a_shared_preamble_and_sub_agents() -> None:
    driver = Driver(cluster(4, 1), LoadRule.LEAST_BACKLOG)
    chosen: Counter[Incarnation | None] = Counter()
    for number in range(40):
        blocks = keys(f"own{number}-", 6, preamble=4)
        placement = driver.place(f"thread::sa:{number}", 6 * BLOCK, blocks)
        driver.router.succeeded(placement)  # nothing is released: load is what spreads
        chosen[placement.context] += 1
    assert len(chosen) == 4
    assert max(chosen.values()) <= 40 / 4 + SPECIFIC_FAN_OUT


@pytest.mark.parametrize("rule", RULES)
def test_a_burst_of_unique_prompts_spreads_evenly(rule: LoadRule) -> None:
    driver = Driver(cluster(4, 2), rule)
    placements = [driver.place(None, 500, keys(f"u{i}", 7)) for i in range(64)]
    contexts = Counter(placement.context for placement in placements)
    generations = Counter(placement.generation for placement in placements)
    assert max(contexts.values()) <= 1.2 * 64 / 4
    assert max(generations.values()) <= 1.2 * 64 / 2


def test_unique_prompts_that_finish_at_once_spread_too() -> None:
    driver = Driver(cluster(4, 1), LoadRule.ESTIMATED)
    contexts = Counter(driver.serve(None, 500, keys(f"u{i}", 7)).context for i in range(1000))
    assert max(contexts.values()) <= 1.2 * 1000 / 4
    driver.router.check()


def test_estimated_leaves_a_cached_prefix_when_its_worker_is_busy() -> None:
    driver = Driver(cluster(2, 1), LoadRule.ESTIMATED)
    first = driver.serve(None, 640, keys("doc", 10))
    assert driver.serve(None, 640, keys("doc", 10)).context == first.context
    contexts = [driver.place(None, 640, keys("doc", 10)).context for _ in range(100)]
    assert contexts[:3] == [first.context] * 3
    assert set(contexts) != {first.context}


def test_no_context_leg_when_the_generation_worker_holds_nearly_all() -> None:
    settings = RouterSettings(local_prefill_tokens=32)
    router = ConversationRouter(settings)
    snapshots = cluster(1, 1)

    def place(tokens: int, number: int) -> Placement:
        blocks = keys("doc", tokens // BLOCK)
        request = RouteRequest(
            request_id=f"r{number}", prompt_tokens=tokens, keys=blocks, max_output_tokens=9
        )
        placement = router.place(request, snapshots)
        router.reserve(placement)
        router.succeeded(placement)
        return placement

    assert place(640, 0).context is not None
    local = place(650, 1)
    assert (local.context, local.reason) == (None, PlacementReason.LOCAL)
    assert local.prefill.worker == local.generation
    assert place(700, 2).context is not None
    # A short prompt has no full block: nothing is known of it, so it goes the whole way.
    assert place(20, 3).context is not None


def test_without_context_workers_the_generation_worker_prefills() -> None:
    driver = Driver(cluster(0, 2), LoadRule.ESTIMATED)
    placement = driver.serve("chat", 100)
    assert placement.context is None
    assert placement.reason is PlacementReason.NO_CONTEXT


def test_one_token_is_left_to_the_context_worker() -> None:
    driver = Driver(cluster(1, 1), LoadRule.ESTIMATED)
    placement = driver.place(None, 100, max_output_tokens=1)
    assert placement.generation is None
    assert placement.sequence is None


def test_repair_prefers_the_worker_and_then_anyone_who_lives() -> None:
    driver = Driver(cluster(1, 2), LoadRule.ESTIMATED)
    request = RouteRequest(request_id="r.1", prompt_tokens=100, max_output_tokens=5)
    first, second = (entry.incarnation for entry in driver.snapshots[1:])
    place = driver.router.place_repair
    assert place(request, driver.snapshots, second).generation == second
    excluded = RouteRequest(
        request_id="r.1", prompt_tokens=100, excluded=frozenset({second}), max_output_tokens=5
    )
    assert place(excluded, driver.snapshots, second).generation == first
    only_context = driver.snapshots[:1]
    assert place(excluded, only_context, second).generation == only_context[0].incarnation


def test_the_number_of_followed_conversations_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    with caplog.at_level(logging.INFO, logger="router.conversation"):
        for number in range(256):
            driver.serve(f"c{number}", 10)
    assert [record.getMessage() for record in caplog.records] == [
        "256 new conversations so far, 0 of them followed a matching prefix"
    ]


def test_a_conversation_that_moves_may_fetch_its_prefix() -> None:
    driver = Driver(cluster(2, 1), LoadRule.LEAST_BACKLOG)
    blocks = keys("a", 10)
    first = driver.serve("conversation", 640, blocks)
    assert first.prefix_source is None
    again = driver.serve("conversation", 700, keys("a", 10))
    assert again.context == first.context
    assert again.prefix_source is None, "its own context worker has it"
    other = next(
        w for w in driver.snapshots if w.role == "context" and w.incarnation != first.context
    )
    driver.snapshots = [w for w in driver.snapshots if w.incarnation != first.context]
    moved = driver.place("conversation", 700, keys("a", 10))
    assert moved.context == other.incarnation
    assert moved.generation is not None
    # Of two that hold the prompt, the one that decoded it: it holds the answer, too.
    assert moved.prefix_source == PrefixHolder(moved.generation, 640)
    driver.ended(moved)


def test_a_short_prefix_is_computed_where_it_is_needed() -> None:
    driver = Driver(cluster(2, 1), LoadRule.ROUND_ROBIN)
    for _ in range(4):
        placement = driver.serve(None, 250, keys("a", 3))
        assert placement.prefix_source is None
