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
SHARED_LANES_S: Final = 4.0
"""The same for two processes of one host that may share memory, which have it as their last step.
Longer than the silence after which a peer that stands still is lost, and shorter than the time for
a dial; waited only where memory is not shared after all, as between containers.
"""
LOOK_S: Final = 0.05
"""The most that counts between two looks. More says that this process stood still, and what has
come meanwhile was not looked at.
"""
STEPS: Final = 2
"""Changes until they stay."""


class LaneWatch:
    """Of one endpoint, from its creation on."""

    def __init__(self, lanes: Hashable, now_s: float, patience_s: float = LANES_S) -> None:
        """``patience_s`` is how long lanes that do not change may still do so."""
        self._lanes = lanes
        self._patience_s = patience_s
        self._changes = 0
        self._unchanged_s = 0.0
        self._looked_s = now_s

    def stay(self, lanes: Hashable, now_s: float) -> bool:
        """Whether lanes that are now so will stay so."""
        self._unchanged_s += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        if lanes != self._lanes:
            self._lanes = lanes
            self._changes += 1
            self._unchanged_s = 0.0
        return self._changes >= STEPS or self._unchanged_s >= self._patience_s
