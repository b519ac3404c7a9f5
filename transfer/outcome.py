"""The two facts about a transfer, kept apart: how it ended, and whether its memory may still be
touched.

An outcome is decided once and may be decided by a deadline. Access ends only by physical
completion: pages go back to their pool at NOT_SUBMITTED or ENDED, never at IN_FLIGHT and, while
nobody proves that the peer is dead, never at IN_DOUBT.
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a session ended for the request."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Access(Enum):
    """Whether a leased page may still be read or written by a posted request."""

    NOT_SUBMITTED = "not submitted"
    IN_FLIGHT = "in flight"
    ENDED = "ended"
    IN_DOUBT = "in doubt"


class PostStatus(Enum):
    """How one posted send or receive ended."""

    DONE = "done"
    """All bytes moved; the request itself has completed."""
    REVOKED = "revoked"
    """Not all bytes moved, but the request itself has ended (or was never submitted): nothing
    touches the memory now.
    """
    LOST = "lost"
    """The endpoint went away first: unless the peer's process is dead it may still touch the
    memory.
    """


class PeerFate(Enum):
    """What is known about the process behind a lost connection."""

    DEAD = "dead"
    UNKNOWN = "unknown"
