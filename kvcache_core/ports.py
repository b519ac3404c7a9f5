"""What the manager needs from the outside: somebody who copies the bytes of a slot."""

from __future__ import annotations

from typing import Protocol


class PageCopier(Protocol):
    """Copies slots. The copy is ordered after every earlier write of the engine's stream and before
    every transfer that is posted after it.
    """

    def copy_slot(self, pool_group: int, source: int, target: int) -> None:
        """Copy all pools of ``pool_group`` from slot ``source`` to slot ``target``."""
        ...
