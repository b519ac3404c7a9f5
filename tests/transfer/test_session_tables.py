"""Every pair of state and event is handled or declared impossible, and impossible pairs raise."""

from __future__ import annotations

from types import UnionType
from typing import get_args

import pytest

from tests.transfer.sessions import context, generation
from transfer.context_session import CONTEXT_IMPOSSIBLE, CONTEXT_TRANSITIONS
from transfer.generation_session import GENERATION_IMPOSSIBLE, GENERATION_TRANSITIONS
from transfer.messages import Announce, Grant
from transfer.pull_session import PULL_IMPOSSIBLE, PULL_TRANSITIONS
from transfer.session import SessionState, Transitions
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    ContextEvent,
    GenerationEvent,
    PullerEvent,
    SourceEvent,
)
from transfer.source_session import SOURCE_IMPOSSIBLE, SOURCE_TRANSITIONS
from transfer.story import STORY_ENTRIES, InvalidTransition

S = SessionState
TABLES = [
    pytest.param(
        set(S) - {S.ASKED, S.RECEIVING, S.COMPLETING},
        ContextEvent,
        CONTEXT_TRANSITIONS,
        CONTEXT_IMPOSSIBLE,
        id="context",
    ),
    pytest.param(
        set(S) - {S.ASKED, S.COMPUTED, S.SHIPPING, S.HANDED_OFF},
        GenerationEvent,
        GENERATION_TRANSITIONS,
        GENERATION_IMPOSSIBLE,
        id="generation",
    ),
    pytest.param(
        set(S) - {S.GRANTED, S.RECEIVING, S.COMPLETING},
        SourceEvent,
        SOURCE_TRANSITIONS,
        SOURCE_IMPOSSIBLE,
        id="source",
    ),
    pytest.param(
        set(S) - {S.GRANTED, S.COMPUTED, S.SHIPPING, S.HANDED_OFF},
        PullerEvent,
        PULL_TRANSITIONS,
        PULL_IMPOSSIBLE,
        id="puller",
    ),
]


@pytest.mark.parametrize(("states", "events", "transitions", "impossible"), TABLES)
def test_every_pair_is_handled_or_declared_impossible(
    states: set[SessionState],
    events: UnionType,
    transitions: Transitions,
    impossible: dict[SessionState, frozenset[type]],
) -> None:
    declared = {(state, event) for state, kinds in impossible.items() for event in kinds}
    assert set(impossible) == states
    assert not declared & set(transitions)
    assert declared | set(transitions) == {
        (state, event) for state in states for event in get_args(events)
    }


def test_an_impossible_event_raises_with_the_story_and_changes_nothing() -> None:
    session = context()
    session.handle(Grant(request_id="r", session="s", prompt_tokens=1, deadline_ms=9), 0)
    session.handle(AnnounceRequested(), 3)
    with pytest.raises(
        InvalidTransition, match="AnnounceRequested cannot happen in state ANNOUNCED"
    ) as caught:
        session.handle(AnnounceRequested(), 5)
    assert caught.value.state is S.ANNOUNCED
    assert caught.value.story == session.story
    assert "3 ms: GRANTED AnnounceRequested -> ANNOUNCED" in str(caught.value)
    assert session.state is S.ANNOUNCED


def test_an_event_of_the_other_end_raises() -> None:
    with pytest.raises(InvalidTransition):
        generation().handle(AnnounceRequested(), 0)


def test_the_story_keeps_the_last_entries() -> None:
    session = generation()
    session.handle(CancelRequested("first"), 0)
    for number in range(1, 50):
        session.handle(Announce(session="s"), number)
    assert len(session.story) == STORY_ENTRIES
    assert session.story[-1].startswith("49 ms: CLOSED Announce -> CLOSED")
