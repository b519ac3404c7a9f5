"""How long a peer has been silent, counted only in time in which this process could have heard it.

A process that is stopped, or whose event loop is held up, finds on waking that its own clock has
run on while the words of its peers wait unread in the socket. So silence grows with the ticks of
the listener's own loop, by at most one period a tick however late that comes, and a peer is only
given up after a whole silent period of a running loop.
"""

from __future__ import annotations


class Silence:
    """Of one peer. Times are seconds of one monotonic clock, the caller's."""

    def __init__(self, period_s: float, now_s: float) -> None:
        """:meth:`tick` will be called every ``period_s``."""
        self._period_s = period_s
        self._counted_to_s = now_s
        self._silent_s = 0.0

    def heard(self, now_s: float) -> None:
        """The peer said something."""
        self._silent_s = 0.0
        self._counted_to_s = now_s

    def tick(self, now_s: float) -> float:
        """Seconds of silence up to this tick."""
        self._silent_s += min(now_s - self._counted_to_s, self._period_s)
        self._counted_to_s = now_s
        return self._silent_s
