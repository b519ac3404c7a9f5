"""Integer helpers used everywhere a count of blocks, pages or bytes is derived."""

from __future__ import annotations


def ceil_div(value: int, divisor: int) -> int:
    """The smallest integer n with ``n * divisor >= value``."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return ceil_div(value, multiple) * multiple
