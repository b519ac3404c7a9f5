"""When the lanes of an endpoint are those that stay, by looking at them.

An endpoint comes up in three steps: the connection, a lane beside it, and the lanes of every other
device once the listener has told its own. UCX tells nobody which step it has come to.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

LANES_S: Final = 0.5
"""How long lanes that did not change may still change. A pair of hosts with nothing but one TCP
device each keeps its first lanes, and no other sign says that they will stay: such a pair waits
this long, once. Others have theirs after some 30 ms.
"""
STEPS: Final = 2
"""Changes until they stay."""


class LaneWatch:
    """Of one endpoint, from its creation on."""

    def __init__(self, lanes: Hashable, now_s: float) -> None:
        self._lanes = lanes
        self._changes = 0
        self._changed_s = now_s

    def stay(self, lanes: Hashable, now_s: float) -> bool:
        """Whether lanes that are now so will stay so."""
        if lanes != self._lanes:
            self._lanes = lanes
            self._changes += 1
            self._changed_s = now_s
        return self._changes >= STEPS or now_s - self._changed_s >= LANES_S
