"""The last things that happened to a session, kept for the error that needs them."""

from __future__ import annotations

from collections import deque
from enum import Enum

STORY_ENTRIES = 32


class Story:
    """A ring of the last ``STORY_ENTRIES`` lines."""

    def __init__(self) -> None:
        self._entries: deque[str] = deque(maxlen=STORY_ENTRIES)

    def add(self, entry: str) -> None:
        """Append one line."""
        self._entries.append(entry)

    def entries(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(self._entries)


class InvalidTransition(RuntimeError):
    """An event that cannot happen in this state: a bug on this side, or a peer that breaks the
    protocol.
    """

    def __init__(self, session: str, state: Enum, event: object, story: tuple[str, ...]) -> None:
        self.session = session
        self.state = state
        self.event = event
        self.story = story
        lines = "\n  ".join(story)
        super().__init__(
            f"session {session}: {type(event).__name__} cannot happen in state {state.name}; "
            f"drop the peer if it sent this, else fix the caller. Story:\n  {lines}"
        )
