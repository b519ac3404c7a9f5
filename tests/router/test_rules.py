"""Properties of the load rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement import PrefixHolder
from router.rules import (
    ContextCandidate,
    GenerationCandidate,
    LoadRule,
    PromptFacts,
    RuleSettings,
    choose_context,
    choose_generation,
    choose_prefix_source,
)
from transfer.identity import Incarnation

RULES = st.sampled_from(list(LoadRule))
SETTINGS = st.builds(
    RuleSettings,
    rule=RULES,
    beta=st.sampled_from((0.5, 1.0, 4.0)),
    min_match_tokens=st.sampled_from((64, 128)),
    spill_backlog_tokens=st.sampled_from((500, 100_000)),
)
FACTS = st.builds(
    PromptFacts,
    request_id=st.text("abc", min_size=1, max_size=4),
    prompt_tokens=st.integers(1, 2000),
    preamble_tokens=st.sampled_from((0, 64, 640)),
    new_conversation=st.booleans(),
)


@st.composite
def contexts(draw: st.DrawFn) -> list[ContextCandidate]:
    count = draw(st.integers(1, 6))
    bound = draw(st.integers(0, 8))
    return [
        ContextCandidate(
            incarnation=Incarnation(instance=f"c{i}", nonce="0"),
            backlog_tokens=draw(st.integers(0, 2000)),
            prefills=draw(st.integers(0, 3)),
            cached_tokens=draw(st.sampled_from((0, 64, 128, 640, 1024))),
            bound=i == bound,
        )
        for i in range(count)
    ]


@st.composite
def generations(draw: st.DrawFn) -> list[GenerationCandidate]:
    count = draw(st.integers(1, 6))
    bound = draw(st.integers(0, 8))
    return [
        GenerationCandidate(
            incarnation=Incarnation(instance=f"g{i}", nonce="0"),
            reserved_tokens=draw(st.integers(0, 2000)),
            sequences=draw(st.integers(0, 3)),
            cached_tokens=draw(st.sampled_from((0, 64, 128, 640, 1024))),
            total_tokens=draw(st.sampled_from((0, 1000, 4000))),
            bound=i == bound,
        )
        for i in range(count)
    ]


@given(contexts(), FACTS, SETTINGS, st.integers(0, 10), st.integers(0, 1000))
def test_context_choice_ignores_order_and_is_monotone(
    candidates: list[ContextCandidate],
    facts: PromptFacts,
    settings: RuleSettings,
    cursor: int,
    shuffle: int,
) -> None:
    chosen, reason = choose_context(candidates, facts, settings, cursor)
    mixed = candidates[:]
    random.Random(shuffle).shuffle(mixed)
    assert choose_context(mixed, facts, settings, cursor) == (chosen, reason)
    better = [
        replace(entry, cached_tokens=entry.cached_tokens + 64) if entry == chosen else entry
        for entry in candidates
    ]
    again, _ = choose_context(better, facts, settings, cursor)
    assert again.incarnation == chosen.incarnation, "more cached tokens hurt"
    for other in candidates:
        if other == chosen:
            continue
        worse = [
            replace(entry, backlog_tokens=entry.backlog_tokens + 300) if entry == other else entry
            for entry in candidates
        ]
        again, _ = choose_context(worse, facts, settings, cursor)
        assert again.incarnation != other.incarnation, "more backlog helped"


@given(generations(), FACTS, SETTINGS, st.integers(1, 3000), st.integers(0, 10))
def test_generation_choice_ignores_order_and_is_monotone(
    candidates: list[GenerationCandidate],
    facts: PromptFacts,
    settings: RuleSettings,
    needed: int,
    cursor: int,
) -> None:
    chosen = choose_generation(candidates, facts, settings, needed, cursor)
    assert choose_generation(candidates[::-1], facts, settings, needed, cursor) == chosen
    better = [
        replace(entry, cached_tokens=entry.cached_tokens + 64) if entry == chosen else entry
        for entry in candidates
    ]
    again = choose_generation(better, facts, settings, needed, cursor)
    assert again.incarnation == chosen.incarnation
    for other in candidates:
        if other == chosen:
            continue
        worse = [
            replace(entry, reserved_tokens=entry.reserved_tokens + 300) if entry == other else entry
            for entry in candidates
        ]
        again = choose_generation(worse, facts, settings, needed, cursor)
        assert again.incarnation != other.incarnation


def test_a_prefix_comes_from_whoever_holds_most_and_from_nobody_for_too_little() -> None:
    a, b, c = (Incarnation(instance=name, nonce="0") for name in "abc")
    holders = [PrefixHolder(a, 640), PrefixHolder(b, 1024), PrefixHolder(c, 1024)]
    settings = RuleSettings(pull_tokens=256)
    for preferred in (b, c):
        for order in (holders, holders[::-1]):
            chosen = choose_prefix_source(order, "r", 0, preferred, settings)
            assert chosen == PrefixHolder(preferred, 1024)
    # Whoever holds less is not asked, though the conversation was decoded there.
    chosen = choose_prefix_source(holders[:2], "r", 0, a, settings)
    assert chosen == PrefixHolder(b, 1024)
    assert choose_prefix_source(holders, "r", 1024 - 256, None, settings) is not None
    assert choose_prefix_source(holders, "r", 1024 - 255, None, settings) is None
    assert choose_prefix_source([], "r", 0, None, settings) is None


def test_no_candidates_is_an_error_of_the_caller() -> None:
    facts = PromptFacts(request_id="r", prompt_tokens=1)
    with pytest.raises(ValueError, match="at least one"):
        choose_context([], facts, RuleSettings(), 0)
    with pytest.raises(ValueError, match="at least one"):
        choose_generation([], facts, RuleSettings(), 1, 0)
