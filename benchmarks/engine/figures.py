"""Figures by side and key: every one is a number, or null with the reason."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any, Final

from benchmarks.engine.workloads import KEYS

OURS: Final = "pageferry"
PEERS: Final = ("vllm", "transformers")
SIDES: Final = (OURS, *PEERS)
FLOOR: Final = "floor_tok_s"
KEPT_DIGITS: Final = 3


class Figures:
    """What has been measured so far. Nothing is ever written down that this run did not see."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, float]] = {side: {} for side in SIDES}
        self._reasons: dict[str, dict[str, str]] = {side: {} for side in SIDES}
        self._facts: dict[str, dict[str, Any]] = {side: {} for side in SIDES}

    def add(self, side: str, key: str, number: float) -> None:
        """Keep and print one figure."""
        self._numbers[side][key] = round(number, KEPT_DIGITS)
        print(f"{side:13} {key:26} {self._numbers[side][key]}", flush=True)

    def lacks(self, side: str, keys: Iterable[str], reason: str) -> None:
        """Say why figures are missing. The first reason stands, and so does a number."""
        for key in keys:
            if key not in self._numbers[side] and key not in self._reasons[side]:
                self._reasons[side][key] = reason
                print(f"{side:13} {key:26} null: {reason}", flush=True)

    def left_out(self, side: str, reasons: dict[str, str]) -> None:
        """As ``lacks``, for what nobody misses."""
        self._reasons[side] |= reasons

    def failed(self, side: str, keys: Iterable[str], error: Exception) -> None:
        """As ``lacks``, for what was tried; the whole story goes to stderr."""
        traceback.print_exception(error)
        self.lacks(side, keys, f"{type(error).__name__}: {error}")

    def tell(self, side: str, **facts: Any) -> None:
        """What else a reader must know of a side: versions, ways."""
        self._facts[side] |= facts

    def result(self, floor_tok_s: float | None) -> dict[str, Any]:
        """Ours on top, each peer under its name."""
        sides = {side: self._side(side, floor_tok_s) for side in SIDES}
        ours = sides.pop(OURS)
        return {**ours, FLOOR: floor_tok_s, **sides}

    def table(self) -> str:
        """A line a key, a column a side."""
        lines = [f"{'':26}" + "".join(f"{side:>14}" for side in SIDES)]
        for key in KEYS:
            cells = (self._numbers[side].get(key) for side in SIDES)
            if any(key in self._numbers[side] for side in SIDES):
                lines.append(f"{key:26}" + "".join(f"{_text(cell):>14}" for cell in cells))
        return "\n".join(lines)

    def _side(self, side: str, floor_tok_s: float | None) -> dict[str, Any]:
        numbers, reasons = self._numbers[side], self._reasons[side]
        known = [key for key in KEYS if key in numbers or key in reasons]
        found: dict[str, Any] = {key: numbers.get(key) for key in known}
        if floor_tok_s and "decode_b1_tok_s" in numbers:
            found["decode_b1_of_floor"] = round(numbers["decode_b1_tok_s"] / floor_tok_s, 3)
        return {**found, **self._facts[side], "absent": reasons}


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
