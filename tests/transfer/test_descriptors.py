"""Limits of file descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from transfer.descriptors import check_left, raise_limit
from transfer.transport import TransportError

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def used() -> Iterator[int]:
    """How many are open; the limit is as before afterwards."""
    before = resource.getrlimit(FILES)
    yield len(os.listdir("/proc/self/fd"))
    resource.setrlimit(FILES, before)


def test_all_that_the_system_allows_are_taken(used: int) -> None:
    most = resource.getrlimit(FILES)[1]
    resource.setrlimit(FILES, (used + 20, most))
    raise_limit()
    assert resource.getrlimit(FILES) == (most, most)


def test_what_is_not_left_is_refused_with_both_numbers(used: int) -> None:
    resource.setrlimit(FILES, (used + 20, resource.getrlimit(FILES)[1]))
    check_left(10)
    with pytest.raises(TransportError, match=rf"of {used + 20} .* may take 30"):
        check_left(30)
