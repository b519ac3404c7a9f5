"""The restart policy, as a pure state machine."""

from __future__ import annotations

import pytest

from services.supervisor import (
    FIRST_BACKOFF_MS,
    MAX_BACKOFF_MS,
    STABLE_AFTER_MS,
    Phase,
    Supervision,
    backoff_ms,
)


def test_a_start_that_fails_before_ever_being_up_is_final() -> None:
    assert Supervision().started().died(0).phase is Phase.GIVEN_UP


def test_a_death_leads_to_a_new_incarnation_after_the_back_off() -> None:
    state = Supervision().started().came_up(1_000).died(2_000)
    assert state.phase is Phase.WAITING
    assert state.start_at_ms == 2_000 + FIRST_BACKOFF_MS
    assert state.started().starts == 2


def test_back_off_grows_with_quick_deaths_and_is_bounded() -> None:
    state = Supervision()
    now = 0
    waits = []
    for _ in range(12):
        state = state.started().came_up(now).died(now + 10)
        waits.append(state.start_at_ms - (now + 10))
        now = state.start_at_ms
    assert waits[:4] == [200, 400, 800, 1_600]
    assert waits[-1] == MAX_BACKOFF_MS


def test_failed_restarts_count_too_and_never_give_up() -> None:
    state = Supervision().started().came_up(0).died(10)
    for _ in range(50):
        state = state.started().died(20)
    assert state.phase is Phase.WAITING
    assert state.start_at_ms == 20 + MAX_BACKOFF_MS


def test_a_stable_life_resets_the_back_off() -> None:
    state = Supervision().started().came_up(0).died(1).started().came_up(2).died(3)
    assert state.failures == 2
    state = state.started().came_up(10).died(10 + STABLE_AFTER_MS)
    assert state.failures == 1
    assert state.start_at_ms == 10 + STABLE_AFTER_MS + FIRST_BACKOFF_MS


def test_impossible_events_raise() -> None:
    with pytest.raises(ValueError, match="cannot die"):
        Supervision().died(0)
    with pytest.raises(ValueError, match="expected an instance that is starting"):
        Supervision().came_up(0)
    with pytest.raises(ValueError, match="expected an instance that is waiting"):
        Supervision().started().started()


def test_back_off_never_overflows() -> None:
    assert backoff_ms(10_000) == MAX_BACKOFF_MS
