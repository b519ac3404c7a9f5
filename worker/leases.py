"""Pages that a transfer may touch, and the sessions that are not over: the engine's side of both.

A lease entered here leaves by ``ended`` only, when the agent says that nothing touches its pages
any more; a lease in doubt is quarantined until then. A request id may be used for a new session
only when its old one is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.lease import TransferLease
from worker.ports import CacheManager


@dataclass(slots=True)
class _Held:
    lease: TransferLease
    blocks: int
    quarantined: bool = False


class LeaseBook:
    """Outstanding leases and open sessions."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._held: dict[int, _Held] = {}
        self._sessions: set[str] = set()
        self.quarantined_blocks = 0

    def add(self, lease: TransferLease, blocks: int) -> None:
        """Note a lease that is about to be given to the agent."""
        self._held[id(lease)] = _Held(lease, blocks)

    def ended(self, lease: TransferLease) -> None:
        """Return the pages. Raises KeyError for a lease that is not outstanding."""
        held = self._held.pop(id(lease))
        if held.quarantined:
            self.quarantined_blocks -= held.blocks
        self._manager.release(lease)

    def in_doubt(self, lease: TransferLease) -> None:
        """Quarantine the pages. Raises KeyError for a lease that is not outstanding."""
        held = self._held[id(lease)]
        if not held.quarantined:
            held.quarantined = True
            self.quarantined_blocks += held.blocks
            self._manager.quarantine(lease)

    def open_session(self, request_id: str) -> None:
        """A session with this id exists at the agent from now on."""
        self._sessions.add(request_id)

    def close_session(self, request_id: str) -> None:
        """The agent reported the end of the session."""
        self._sessions.discard(request_id)

    def has_session(self, request_id: str) -> bool:
        """Whether the agent still has a session with this id."""
        return request_id in self._sessions

    @property
    def sessions_open(self) -> int:
        """Sessions whose outcome is not known."""
        return len(self._sessions)

    @property
    def outstanding(self) -> int:
        """Leases not returned."""
        return len(self._held)
