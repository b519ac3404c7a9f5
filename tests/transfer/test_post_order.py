"""Posts that wait behind others are not stuck, and those that do not are."""

from __future__ import annotations

from transfer.post_order import PostOrder
from transfer.region import Post, Region


def posts(*numbers: int) -> list[Post]:
    return [Post(number, Region(0, 0, 0, 1), 1) for number in numbers]


def test_the_end_of_what_is_ahead_counts_for_those_behind_it() -> None:
    order = PostOrder()
    order.made("a", posts(0, 1))
    order.made("b", posts(0))
    assert order.ahead_ms("b") == 0
    order.ended("a", 0, 7)
    assert (order.ahead_ms("a"), order.ahead_ms("b")) == (7, 7)
    order.ended("b", 0, 9)
    assert order.ahead_ms("a") == 7


def test_the_end_of_what_is_behind_counts_for_nobody() -> None:
    order = PostOrder()
    order.made("a", posts(0))
    order.made("b", posts(0, 1))
    order.made("a", posts(1))
    order.ended("b", 0, 5)
    order.ended("b", 1, 6)
    assert order.ahead_ms("a") == 0
    order.ended("a", 0, 8)
    assert order.ahead_ms("a") == 8


def test_with_its_last_post_a_session_is_forgotten() -> None:
    order = PostOrder()
    order.made("a", posts(0))
    order.made("b", posts(0))
    order.ended("a", 0, 3)
    order.ended("b", 0, 4)
    assert order.ahead_ms("b") == 0
    order.made("b", posts(1))
    order.made("c", ())
    order.ended("b", 1, 5)
    assert (order.ahead_ms("b"), order.ahead_ms("c")) == (0, 0)
