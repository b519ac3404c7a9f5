"""Whose posts of a pair wait behind whose: they are made and mostly end in the order commanded.

A session whose own posts stand still is not stuck while those ahead of them end. That is bounded:
what is ahead was commanded earlier, so it grows no more.
"""

from __future__ import annotations

from collections.abc import Iterable

from transfer.region import Post


class PostOrder:
    """Open posts of one pair by session id. Ends may come in any order."""

    def __init__(self) -> None:
        self._next_place = 0
        self._open: dict[str, dict[int, int]] = {}
        """Place in the order by post id, earliest first."""
        self._ahead_ms: dict[str, int] = {}

    def made(self, session: str, posts: Iterable[Post]) -> None:
        """Posts are commanded."""
        for post in posts:
            self._open.setdefault(session, {})[post.id] = self._next_place
            self._next_place += 1

    def ended(self, session: str, post: int, now_ms: int) -> None:
        """A post has ended, also one that was never made: those behind it have come nearer."""
        places = self._open[session]
        place = places.pop(post)
        if not places:
            del self._open[session]
            self._ahead_ms.pop(session, None)
        for other, theirs in self._open.items():
            if place < next(iter(theirs.values())):
                self._ahead_ms[other] = now_ms

    def ahead_ms(self, session: str) -> int:
        """When a post ahead of all of the session's open ones last ended; 0 for never."""
        return self._ahead_ms.get(session, 0)
