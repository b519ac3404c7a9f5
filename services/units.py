"""Sizes and durations as people write them: ``512MiB``, ``2GB``, ``90s``.

Binary units end in ``iB``, decimal ones in ``B``; a bare letter (``512M``) is refused because both
readings are common.
"""

from __future__ import annotations

import re
from typing import Final

BYTE_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}

_QUANTITY: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str | int) -> int:
    """Bytes of ``text`` (``512MiB``, ``2 GB``, ``4096``). Raises ValueError."""
    return _parse(text, BYTE_UNITS, "a size such as 512MiB, 2GB or 4096", "b")


def parse_duration_ms(text: str | int | float) -> int:
    """Milliseconds of ``text`` (``500ms``, ``90s``, ``10m``, ``1h``; a bare number is
    milliseconds). Raises ValueError."""
    return _parse(text, DURATION_UNITS_MS, "a duration such as 500ms, 90s or 10m", "ms")


def _parse(text: str | float, units: dict[str, int], expected: str, default_unit: str) -> int:
    if isinstance(text, bool):
        raise ValueError(f"expected {expected}, got {text!r}")  # noqa: TRY004  pydantic maps ValueError
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"expected {expected}, got {text!r}")
    number, unit = match.groups()
    factor = units.get(unit.lower() or default_unit)
    if factor is None:
        raise ValueError(
            f"expected {expected}, got {text!r}: {unit!r} is none of {', '.join(units)}"
        )
    return round(float(number) * factor) if "." in number else int(number) * factor


def format_bytes(count: int) -> str:
    """``count`` with a binary unit and one decimal: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
