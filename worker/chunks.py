"""Where the chunks of a prompt end when states are to be kept on the way: pure arithmetic.

A recurrent state can be reused at the exact length at which it was kept, its *snapshot point*. So a
chunk ends on the next point or at the prompt's end, otherwise it is rounded down to a unit. Where
the kernels of a model can keep a state in mid-chunk, at multiples of an alignment, a chunk may pass
one point: the last, if it reaches the prompt's end, or another, if it ends at the following one at
the latest. No point is ever passed without its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """How chunks of sequences with snapshot points end."""

    unit_tokens: int = 1
    """Chunks end on a multiple of it, unless on a point or at the end."""
    alignment_tokens: int | None = None
    """A chunk that begins on a multiple of it can keep states at others; None: no chunk can."""


class Ahead(NamedTuple):
    """What a sequence has before it."""

    start: int
    """Tokens computed."""
    points: tuple[int, ...]
    """Snapshot points after ``start`` and up to the end of what is known, ascending."""


class Part(NamedTuple):
    """The next tokens to compute."""

    tokens: int
    keep: int | None
    """Length, within them, at which the state is kept in mid-chunk."""


def next_part(ahead: Ahead, pending: int, room: int, rules: ChunkRules) -> Part:
    """The longest part of ``pending`` tokens, at most ``room`` of them; at least one token.

    A share of less than a unit is used as it is: a step never idles for the sake of a round number.
    """
    start, points = ahead
    end = start + pending
    limit = min(start + room, end)
    if points and _can_keep(start, points[0], rules):
        is_last = len(points) == 1
        stop = end if is_last else points[1]
        passing = _cut(limit, stop, rules)
        if passing > points[0] and (passing == end or not is_last):
            return Part(passing - start, points[0])
    cut = _cut(limit, points[0] if points else end, rules)
    return Part((cut if cut > start else limit) - start, None)


def _cut(limit: int, stop: int, rules: ChunkRules) -> int:
    """The last allowed end up to ``limit``: ``stop``, or before it a multiple of the unit."""
    return stop if limit >= stop else limit // rules.unit_tokens * rules.unit_tokens


def _can_keep(start: int, point: int, rules: ChunkRules) -> bool:
    alignment = rules.alignment_tokens
    return alignment is not None and start % alignment == 0 and point % alignment == 0
