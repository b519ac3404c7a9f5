"""What runs next, as pure functions of values: admission by pages, then the chunks of one step.

Pages are given in order of arrival. A new item that does not fit lets younger ones pass until they
have taken as many slots as it wants itself, and no more, so nothing starves. Nothing is admitted
whose known tokens plus one growth block could not be held beside what was admitted before it, so
running sequences are suspended only for pages that are written in the very next step. Of a step's
prefill budget one half is the oldest prompt's, the other goes to those nearest to their first
token; where chunks may end is decided by :mod:`worker.chunks`. No clock, no IO, no manager: the
engine turns its state into these values and carries the plan out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, le
from types import MappingProxyType
from typing import Final, NamedTuple

from worker.chunks import Ahead, ChunkRules, next_part

Slots = tuple[int, ...]
"""Slots per pool group."""

_ARRIVAL: Final = attrgetter("arrival")
ANYWHERE: Final = ChunkRules()
NO_POINTS: Final[Mapping[int, Ahead]] = MappingProxyType({})


class Phase(Enum):
    """Where an item of work stands, as far as scheduling is concerned."""

    RUNNING = "running"
    """Holds pages and computes."""
    SUSPENDED = "suspended"
    """Gave its pages up; wants them back."""
    QUEUED = "queued"
    """A prompt to prefill here that has no pages yet."""
    FETCHING = "fetching"
    """A prefix to be fetched from another instance that has no pages yet."""
    LANDING = "landing"
    """An announced transfer that was promised room and has no pages yet."""
    GRANTING = "granting"
    """A transfer that was not promised room yet."""
    PROMISED = "promised"
    """A transfer that was promised room and has not been announced."""
    RECEIVING = "receiving"
    """A transfer whose pages are allocated and being written."""


HOLDERS: Final = frozenset({Phase.RUNNING, Phase.RECEIVING})
"""They have their pages."""
PROMISES: Final = frozenset({Phase.PROMISED, Phase.LANDING})
"""Their room is promised to a peer, whose own pages may wait for theirs."""
NEW: Final = frozenset({Phase.QUEUED, Phase.GRANTING, Phase.FETCHING})
"""They hold nothing and nobody counts on them yet: younger ones may pass."""


class Item(NamedTuple):
    """One sequence, or one transfer that becomes ``rows`` sequences."""

    key: int
    phase: Phase
    arrival: tuple[int, int]
    """Request's arrival number, then choice: the order of service, older first."""
    demand: Slots
    """Slots it still has to get for all known tokens and one growth block a sequence."""
    rows: int = 1
    passed: int = 0
    """Slots of all pool groups that younger items got while it was kept waiting."""
    uncached: int = 0
    """Tokens that a queued prompt lacks, as far as is known."""
    demoted: int = 0
    """Steps in which it was demoted."""
    borrows: bool = False
    """A prompt that may have, while nobody else computes, what was promised and not called for, so
    that workers which promise each other room do not wait in a circle.
    """


class Row(NamedTuple):
    """One running sequence that has something to compute."""

    key: int
    arrival: tuple[int, int]
    pending: int
    """Known tokens whose KV is not computed; 1 while decoding."""
    last_step: int
    """Number of the step it last ran in: ties for the budget go to whoever waited longest."""
    demoted: int = 0
    """Steps in which it was demoted."""


@dataclass(frozen=True, slots=True)
class Demotion:
    """Prompts that lack more than ``uncached_tokens`` come after all others and give up the
    privilege of the oldest for ``max_iters`` steps; then they are starved and have their place.
    """

    uncached_tokens: int
    max_iters: int

    def applies(self, lacking: int, demoted: int) -> bool:
        """Whether a prompt that lacks so many tokens and was demoted in so many steps is in this
        one. What a running prompt lacks is exact; of a queued one it may be an expectation.
        """
        return lacking > self.uncached_tokens and demoted < self.max_iters

    def verdict(self, *, expected: int, found: int, demoted: int) -> Verdict:
        """On a prompt that was ordered by ``expected`` tokens and, matched, lacks ``found``."""
        if self.applies(found, demoted) and not self.applies(expected, demoted):
            return Verdict.DEFER
        return Verdict.START


class Verdict(Enum):
    """What becomes of a prompt that has just been matched."""

    START = "start"
    DEFER = "defer"
    """It was ordered among the short ones and is a long one: it gives back what it claimed and is
    tried again after the rest.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of the pools."""

    max_batch_tokens: int
    max_running: int
    total: Slots
    """All slots but quarantined ones."""
    demotion: Demotion | None = None
    chunks: ChunkRules = ANYWHERE


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
    """The oldest item that slots were too few for, if any."""
    passed: tuple[tuple[int, int], ...] = ()
    """Items that younger ones passed in this plan, each with the slots that those got."""
    demoted: tuple[int, ...] = ()
    """Queued prompts that came after younger items in this plan because of what they lack."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody gets anything."""
        return not (self.resume or self.land or self.admit or self.grant)


class Chunk(NamedTuple):
    """Compute the next ``tokens`` pending tokens of a sequence."""

    key: int
    tokens: int
    keep: int | None = None
    """Length of the sequence at which its state is kept in mid-chunk."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order in which they get pages, oldest first, and who may be suspended for them,
    in order.
    """

    chunks: tuple[Chunk, ...]
    victims: tuple[int, ...]
    demoted: tuple[int, ...] = ()
    """Rows that were demoted in this step."""


def fits(demand: Slots, free: Slots) -> bool:
    """Whether every pool group has enough."""
    return all(map(le, demand, free))


def _minus(left: Slots, right: Slots) -> Slots:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _plus(left: Slots, right: Slots) -> Slots:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def plan_admission(items: Sequence[Item], available: Slots, limits: Limits) -> Admission:
    """Who gets pages, or a promise of pages, now: in order of arrival, demoted prompts last.

    ``available`` counts free and evictable slots. What running and receiving items will still need
    is set aside first; then the others are served in order of arrival. New items leave alone what
    was promised, to younger ones too: peers hold pages until a promise is kept. Suspended ones do
    not, so that an old one is not kept out by a young promise. Where nobody computes or receives,
    one prompt that borrows may have what was promised, whoever waits before it.
    """
    left = _Left(available, limits)
    lends = True
    entrants: list[Item] = []
    for item in items:
        if item.phase in HOLDERS:
            left.take(item, item.demand)
            lends = lends and not item.rows
        else:
            entrants.append(item)
            if item.phase in PROMISES:
                left.promise(item)
    entrants.sort(key=_ARRIVAL)
    demoted = _last(entrants, limits.demotion)
    short: int | None = None
    waiting: list[tuple[Item, int]] = []  # with the slots that were given before it
    given, patience = 0, sys.maxsize  # new items get no more than ``patience`` slots
    chosen: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    for item in entrants:
        demand = left.capped(item)
        new = item.phase in NEW
        cost = sum(demand) if new else 0
        if item.phase in PROMISES:
            left.keep_promise(item)
        borrows = item.borrows and lends and left.lends(item, demand)
        if borrows or (given + cost <= patience and left.fits(item, demand)):
            lends = lends and not borrows
            left.take(item, demand)
            given += cost
            chosen[item.phase].append(item.key)
            continue
        if short is None and not left.holds(item, demand):
            short = item.key
        if not new:
            break
        waiting.append((item, given))
        patience = min(patience, given + max(0, cost - item.passed))
    return Admission(
        resume=tuple(chosen[Phase.SUSPENDED]),
        land=tuple(chosen[Phase.LANDING] + chosen[Phase.FETCHING]),
        admit=tuple(chosen[Phase.QUEUED]),
        grant=tuple(chosen[Phase.GRANTING]),
        short_of_slots=short,
        passed=tuple((item.key, given - before) for item, before in waiting if given > before),
        demoted=demoted,
    )


def _last(entrants: list[Item], demotion: Demotion | None) -> tuple[int, ...]:
    """Move demoted prompts behind all others; the keys of those that have younger ones before
    them.
    """
    if demotion is None:
        return ()

    def is_demoted(item: Item) -> bool:
        return item.phase is Phase.QUEUED and demotion.applies(item.uncached, item.demoted)

    youngest = max((one.arrival for one in entrants if not is_demoted(one)), default=(0, 0))
    entrants.sort(key=is_demoted)
    return tuple(one.key for one in entrants if is_demoted(one) and one.arrival < youngest)


class _Left:
    """Slots and rows that are left while one plan is made."""

    def __init__(self, free: Slots, limits: Limits) -> None:
        self._free = free
        self._total = limits.total
        self._rows = limits.max_running
        self._promised: Slots = (0,) * len(free)
        self._promised_rows = 0
        self._kept: Slots = self._promised
        """Taken by promises that nobody has called for yet."""
        self._kept_rows = 0

    def capped(self, item: Item) -> Slots:
        """A demand never exceeds the pool: growth blocks must not keep out what would fit alone."""
        if fits(item.demand, self._total):
            return item.demand
        return tuple(min(need, have) for need, have in zip(item.demand, self._total, strict=True))

    def promise(self, item: Item) -> None:
        """Set aside from new items."""
        self._promised = _plus(self._promised, self.capped(item))
        self._promised_rows += item.rows

    def keep_promise(self, item: Item) -> None:
        """Its turn has come."""
        self._promised = _minus(self._promised, self.capped(item))
        self._promised_rows -= item.rows

    def holds(self, item: Item, demand: Slots) -> bool:
        """Whether there are slots enough."""
        if item.phase not in NEW or not self._promised_rows:
            return fits(demand, self._free)
        return fits(demand, _minus(self._free, self._promised))

    def fits(self, item: Item, demand: Slots) -> bool:
        """Whether there are slots and rows enough."""
        rows = self._rows
        if self._promised_rows and item.phase in NEW:
            rows -= self._promised_rows
        return item.rows <= rows and self.holds(item, demand)

    def lends(self, item: Item, demand: Slots) -> bool:
        """Whether there are enough with those that were promised and not called for."""
        rows = self._rows + self._kept_rows
        return item.rows <= rows and fits(demand, _plus(self._free, self._kept))

    def take(self, item: Item, demand: Slots) -> None:
        """Slots and a place in the steps."""
        self._free = _minus(self._free, demand)
        self._rows -= item.rows
        if item.phase is Phase.PROMISED:
            self._kept = _plus(self._kept, demand)
            self._kept_rows += item.rows


def plan_step(
    rows: Sequence[Row], limits: Limits, ahead: Mapping[int, Ahead] = NO_POINTS
) -> StepPlan:
    """The chunks of one step: every decoding sequence first, then prefill chunks with what is left
    of the budget. Those of sequences with snapshot points ``ahead``, by key, end as the rules say.

    Decoding sequences leave a quarter of the budget to prefills that wait, so that neither starves
    the other when there are more of them than a step can take.
    """
    rows = sorted(rows, key=_ARRIVAL)
    decoding = [row for row in rows if row.pending == 1]
    prefilling = [row for row in rows if row.pending > 1]
    keys = [row.key for row in rows]
    victims = tuple(reversed(keys))
    budget = limits.max_batch_tokens
    places = limits.max_running
    if len(decoding) == len(rows) <= min(budget, places):
        return StepPlan(tuple([Chunk(key, 1) for key in keys]), victims)
    share = budget - budget // 4 if prefilling else budget
    turns = max(1, min(share, places - bool(prefilling)))
    if len(decoding) > turns:
        decoding = sorted(decoding, key=lambda row: (row.last_step, row.arrival))[:turns]
    taken = {row.key: 1 for row in decoding}
    demoted = _demoted(prefilling, limits.demotion)
    if prefilling and places > len(taken):
        others = [row for row in prefilling if row.key not in demoted]
        oldest = (others or prefilling)[0]
        cut = Cut(ahead, limits.chunks)
        taken |= share_prefill(oldest, prefilling, budget - len(taken), places - len(taken), cut)
        chunks = tuple(cut.chunk(row, taken[row.key]) for row in rows if row.key in taken)
    else:
        chunks = tuple([Chunk(key, taken[key]) for key in keys if key in taken])
    return StepPlan(
        chunks=chunks,
        victims=victims,
        demoted=demoted,
    )


def _demoted(rows: Sequence[Row], demotion: Demotion | None) -> tuple[int, ...]:
    if demotion is None or len(rows) < 2:
        return ()
    return tuple(row.key for row in rows if demotion.applies(row.pending, row.demoted))


class Cut:
    """What a row takes of a share."""

    def __init__(self, ahead: Mapping[int, Ahead], rules: ChunkRules) -> None:
        self._ahead = ahead
        self._rules = rules

    def tokens(self, row: Row, share: int) -> int:
        """Tokens that ``row`` takes: some of any share, and not fewer of a larger one."""
        ahead = self._ahead.get(row.key)
        if ahead is None or share <= 0:
            return max(0, min(row.pending, share))
        return next_part(ahead, row.pending, share, self._rules).tokens

    def chunk(self, row: Row, tokens: int) -> Chunk:
        """The chunk of so many tokens."""
        ahead = self._ahead.get(row.key)
        if ahead is None:
            return Chunk(row.key, tokens)
        return Chunk(row.key, *next_part(ahead, row.pending, tokens, self._rules))


def share_prefill(
    oldest: Row, rows: Sequence[Row], budget: int, places: int, cut: Cut
) -> dict[int, int]:
    """Keys and tokens: ``budget`` among at most ``places`` prompts, one of which is ``oldest``.

    The larger half is the oldest prompt's; the rest goes to those with the fewest tokens left, and
    what nobody else wants back to the oldest. So the oldest takes at most twice the steps that it
    would take alone, and a prompt of s tokens waits for the first half and for prompts with at
    most s tokens left, whatever else there is.
    """
    nearest = sorted((row for row in rows if row is not oldest), key=_nearness)
    first = cut.tokens(oldest, budget - budget // 2 if nearest and places > 1 else budget)
    left = budget - first
    taken: dict[int, int] = {}
    for row in nearest[: places - 1]:
        if left <= 0:
            break
        tokens = cut.tokens(row, left)
        taken[row.key] = tokens
        left -= tokens
    first = cut.tokens(oldest, first + left)
    return {oldest.key: first, **taken} if first else taken


def _nearness(row: Row) -> tuple[int, tuple[int, int]]:
    return (row.pending, row.arrival)
