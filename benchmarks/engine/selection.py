"""Which figures of which sides a run is asked for, and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from benchmarks.engine.figures import OURS, SIDES
from benchmarks.engine.workloads import KEYS

HAS: Final = {
    OURS: tuple(key for key in KEYS if key != "decode_b1_compiled_tok_s"),
    "transformers": tuple(key for key in KEYS if key != "start_s"),
    "vllm": tuple(key for key in KEYS if key != "decode_b1_compiled_tok_s"),
}
"""The figures that a side can have."""
WHEN_NAMED: Final = ("transformers.cb_256_tok_s",)
"""Minutes long at that side's rate, so measured only when named."""


class Selection:
    """``only``: keys, sides, or ``SIDE.KEY``; everything usual when empty."""

    def __init__(self, only: Sequence[str]) -> None:
        names = {f"{side}.{key}" for side, keys in HAS.items() for key in keys}
        unknown = set(only) - names - set(KEYS) - set(SIDES)
        if unknown:
            raise ValueError(
                f"expected sides ({', '.join(SIDES)}), keys ({', '.join(KEYS)}) or SIDE.KEY that "
                f"this side has, got {', '.join(sorted(unknown))}"
            )
        self._only = only

    def has(self, side: str, key: str) -> bool:
        """Whether to measure it."""
        name = f"{side}.{key}"
        if name in self._only:
            return True
        if key not in HAS[side] or name in WHEN_NAMED:
            return False
        return not self._only or side in self._only or key in self._only

    def keys(self, side: str) -> list[str]:
        """All that is asked of a side."""
        return [key for key in HAS[side] if self.has(side, key)]

    def left_out(self, side: str) -> dict[str, str]:
        """Why the others are not measured."""
        return {
            key: f"not asked for: --only {side}.{key} measures it"
            for key in HAS[side]
            if not self.has(side, key)
        }


class Budget:
    """Seconds from now on within which parts may begin."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    def left_s(self) -> float:
        """Until no part begins any more."""
        return self._ends - time.monotonic()

    @property
    def reason(self) -> str:
        """What to say of a part that has not begun."""
        return f"not begun within --budget-s {self._seconds:g}: name it with --only"
