"""Silence counts only while the listener itself runs."""

from __future__ import annotations

import pytest

from transfer.silence import Silence


def test_silence_of_a_running_listener_is_the_time_since_the_last_word() -> None:
    silence = Silence(1.0, 10.0)
    assert [silence.tick(11.0), silence.tick(12.0)] == [1.0, 2.0]
    silence.heard(12.75)
    assert silence.tick(13.0) == 0.25
    assert silence.tick(14.0) == 1.25


def test_time_in_which_the_listener_stood_still_is_no_silence() -> None:
    silence = Silence(1.0, 10.0)
    assert silence.tick(11.0) == 1.0
    assert silence.tick(36.0) == 2.0
    silence.heard(36.0)
    assert silence.tick(37.0) == 1.0


def test_a_listener_that_is_always_late_still_finds_a_dead_peer() -> None:
    silence = Silence(1.0, 0.0)
    assert [silence.tick(3.0 * n) for n in range(1, 6)] == pytest.approx([1, 2, 3, 4, 5])
