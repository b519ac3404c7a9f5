"""What the router is told about workers: values taken by the caller, never live objects.

Load that the router itself caused is not in a snapshot; it comes from the ledger, so that it is
counted at once and not after the worker's next report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transfer.identity import Incarnation

Role = Literal["context", "generation", "aggregated"]


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """One live worker."""

    incarnation: Incarnation
    role: Role
    accepting: bool = True
    """Ready, not suspected, not refusing: new requests go elsewhere while there is an elsewhere."""
    total_tokens: int = 0
    """Tokens that its pools hold, 0 when unknown. Bounds what the prefix index believes of it."""
    free_tokens: int = 0
    running: int = 0
    waiting: int = 0
