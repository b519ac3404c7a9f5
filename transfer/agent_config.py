"""What a transfer agent is told once."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer.control import ControlTiming
from transfer.costs import TransferCosts
from transfer.deadlines import TransferLimits


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """``cluster_token`` must be that of every peer; ``host`` is what peers dial."""

    host: str
    cluster_token: str = field(repr=False)
    control_port: int = 0
    """0 takes a free one."""
    timing: ControlTiming = field(default_factory=ControlTiming)
    limits: TransferLimits = field(default_factory=TransferLimits)
    costs: TransferCosts = field(default_factory=TransferCosts)
