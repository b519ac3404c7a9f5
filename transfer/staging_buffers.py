"""The staging buffers of one pair: few, lent in turn, and never reused while a peer may reach them.

A buffer whose request was LOST is *in doubt*: the peer may still write it or read it. It is neither
lent nor freed before the peer is known dead. The pages that it stood for were never in its reach.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from transfer.page_staging import PageStaging
from transfer.staged_cut import device_message_bytes

logger = logging.getLogger(__name__)

STAGING_BUFFERS: Final = 4
"""Of a pair: one is copied while others are under way."""


def device_staging_bytes(memory_bytes: int, pairs: int) -> int:
    """Most that the buffers of so many pairs take on a device of so much memory, where no block is
    larger than a message.
    """
    return pairs * STAGING_BUFFERS * device_message_bytes(memory_bytes)


class StagingBuffers:
    """At most ``STAGING_BUFFERS`` buffers of ``size_bytes``, made when they are first needed; fewer
    where memory for more is not to be had.
    """

    def __init__(self, staging: PageStaging, size_bytes: int) -> None:
        self.size_bytes: Final = size_bytes
        self._staging = staging
        self._free: list[Any] = []
        self._made = 0
        self._most = STAGING_BUFFERS
        self._doubtful: list[Any] = []
        self._peer_dead = False

    @property
    def made_bytes(self) -> int:
        """Bytes of all buffers."""
        return self._made * self.size_bytes

    @property
    def doubtful_bytes(self) -> int:
        """Bytes of the buffers in doubt."""
        return len(self._doubtful) * self.size_bytes

    def take(self) -> Any | None:
        """A buffer, or None while all are lent or in doubt. Raises MemoryError when there is no
        memory for a single one.
        """
        if self._free:
            return self._free.pop()
        if self._made == self._most:
            return None
        try:
            buffer = self._staging.message(self.size_bytes)
        except MemoryError as error:
            if not self._made:
                raise
            logger.warning("pages are staged in %d buffers: %s", self._made, error)
            self._most = self._made
            return None
        self._made += 1
        return buffer

    def give_back(self, buffer: Any) -> None:
        """The request over this buffer has ended: nothing touches it any more."""
        self._free.append(buffer)

    def doubt(self, buffer: Any) -> None:
        """The request over this buffer was LOST."""
        if not self._peer_dead:
            self._doubtful.append(buffer)

    def peer_dead(self) -> None:
        """The peer's process is known dead: let go of what was in doubt."""
        self._peer_dead = True
        self._doubtful.clear()
