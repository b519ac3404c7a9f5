"""What runs next, as pure functions of values: admission by pages, then the chunks of one step.

Order of everything is first come, first served by arrival. Nothing overtakes an older item that
does not fit, so nothing starves; nothing is admitted whose known tokens plus one growth block could
not be held beside what was admitted before it, so running sequences are suspended only for pages
that are written in the very next step. No clock, no IO, no manager: the engine turns its state into
these values and carries the plan out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

Slots = tuple[int, ...]
"""Slots per pool group."""


class Phase(Enum):
    """Where an item of work stands, as far as scheduling is concerned."""

    RUNNING = "running"
    """Holds pages and computes."""
    SUSPENDED = "suspended"
    """Gave its pages up; wants them back."""
    QUEUED = "queued"
    """A prompt to prefill here that has no pages yet."""
    LANDING = "landing"
    """An announced transfer that has no pages yet."""
    GRANTING = "granting"
    """A transfer that was not promised room yet."""
    PROMISED = "promised"
    """A transfer that was promised room and has not been announced."""
    RECEIVING = "receiving"
    """A transfer whose pages are allocated and being written."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence, or one transfer that becomes ``rows`` sequences."""

    key: int
    phase: Phase
    arrival: tuple[int, int]
    """Request's arrival number, then choice: the order of service, older first."""
    demand: Slots
    """Slots it still has to get for all known tokens and one growth block a sequence."""
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence that has something to compute."""

    key: int
    arrival: tuple[int, int]
    pending: int
    """Known tokens whose KV is not computed; 1 while decoding."""
    last_step: int
    """Number of the step it last ran in: ties for the budget go to whoever waited longest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of the pools."""

    max_batch_tokens: int
    max_running: int
    total: Slots
    """All slots but quarantined ones."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Keys to act on, in this order. An action that fails after all is tried again at the next
    plan.
    """

    resume: tuple[int, ...]
    land: tuple[int, ...]
    admit: tuple[int, ...]
    grant: tuple[int, ...]
    short_of_slots: int | None = None
    """The item that slots were too few for, if that is what ended the plan."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next ``tokens`` pending tokens of a sequence."""

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order in which they get pages, oldest first, and who may be suspended for them,
    in order.
    """

    chunks: tuple[Chunk, ...]
    victims: tuple[int, ...]


def fits(demand: Slots, free: Slots) -> bool:
    """Whether every pool group has enough."""
    return all(need <= have for need, have in zip(demand, free, strict=True))


def _minus(left: Slots, right: Slots) -> Slots:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _capped(demand: Slots, total: Slots) -> Slots:
    """A demand never exceeds the pool: growth blocks must not keep out what would fit alone."""
    return tuple(min(need, have) for need, have in zip(demand, total, strict=True))


def plan_admission(items: Sequence[Item], available: Slots, limits: Limits) -> Admission:
    """Who gets pages, or a promise of pages, now.

    ``available`` counts free and evictable slots. What running and receiving items will still need
    is set aside first; then the others are served in order of arrival until one does not fit.
    Promises count as taken for items younger than their holder only, so that an old suspended
    sequence is not kept out by a young promise.
    """
    free = available
    rows = limits.max_running
    for item in items:
        if item.phase in (Phase.RUNNING, Phase.RECEIVING):
            free = _minus(free, item.demand)
            rows -= item.rows
    short: int | None = None
    chosen: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    entrants = (item for item in items if item.phase not in (Phase.RUNNING, Phase.RECEIVING))
    for item in sorted(entrants, key=lambda entrant: entrant.arrival):
        demand = _capped(item.demand, limits.total)
        if item.rows > rows:
            break
        if not fits(demand, free):
            short = item.key
            break
        free = _minus(free, demand)
        rows -= item.rows
        chosen[item.phase].append(item.key)
    return Admission(
        resume=tuple(chosen[Phase.SUSPENDED]),
        land=tuple(chosen[Phase.LANDING]),
        admit=tuple(chosen[Phase.QUEUED]),
        grant=tuple(chosen[Phase.GRANTING]),
        short_of_slots=short,
    )


def plan_step(rows: Sequence[Row], limits: Limits) -> StepPlan:
    """The chunks of one step: every decoding sequence first, then prefill chunks with what is left
    of the budget.

    Decoding sequences leave a quarter of the budget to prefills that wait, so that neither starves
    the other when there are more of them than a step can take.
    """
    decoding = sorted(_decoding(rows), key=lambda row: (row.last_step, row.arrival))
    prefilling = sorted((row for row in rows if row.pending > 1), key=lambda row: row.arrival)
    budget = limits.max_batch_tokens
    places = limits.max_running
    share = budget - budget // 4 if prefilling else budget
    taken: list[tuple[Row, int]] = [
        (row, 1) for row in decoding[: max(1, min(share, places - bool(prefilling)))]
    ]
    budget -= len(taken)
    places -= len(taken)
    for row in prefilling[: max(places, 0)]:
        if budget <= 0:
            break
        tokens = min(row.pending, budget)
        taken.append((row, tokens))
        budget -= tokens
    taken.sort(key=lambda pair: pair[0].arrival)
    return StepPlan(
        chunks=tuple(Chunk(row.key, tokens) for row, tokens in taken),
        victims=youngest_first(rows),
    )


def youngest_first(rows: Iterable[Row]) -> tuple[int, ...]:
    """Keys of ``rows`` in the order in which they are suspended when pages run out."""
    ordered = sorted(rows, key=lambda row: row.arrival, reverse=True)
    return tuple(row.key for row in ordered)


def _decoding(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.pending == 1]
