"""The desk as the scheduler sees it: items that want pages, rows that want to compute.

Demands are careful: they count every block of a prompt although others may hold some of it. Where
that alone keeps the next item out, ``share`` finds out by looking what it would really share.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from operator import itemgetter, le
from typing import Final

from transfer.identity import Incarnation
from worker.chunks import Ahead
from worker.desk import Desk
from worker.ports import CacheSequence
from worker.prefix_waits import PrefixWaits
from worker.requests import LegRecord, LegState, Sequence, SequenceState
from worker.scheduler import NO_POINTS, Demotion, Item, Phase, Row, Slots

MAX_ENTRANTS: Final = 256
"""Items beyond the oldest this many are not looked at in one plan: they could not be served
anyway.
"""

LOOK_STEPS: Final = 8
"""Steps after which those whom a plan gave nothing are looked at anew in any case."""
_FIRST: Final = itemgetter(0)

LEG_PHASES: Final = {
    LegState.AWAITING_ROOM: Phase.GRANTING,
    LegState.GRANTED: Phase.PROMISED,
    LegState.LANDING: Phase.LANDING,
    LegState.PULL_WAITING: Phase.FETCHING,
}
RECEIVING: Final = frozenset({LegState.RECEIVING, LegState.PULLING, LegState.PULL_RECEIVING})
"""States of legs whose room is set aside for what a peer writes."""
SEQUENCE_PHASES: Final = {
    SequenceState.QUEUED: Phase.QUEUED,
    SequenceState.SUSPENDED: Phase.SUSPENDED,
}


@dataclass(frozen=True, slots=True)
class Glance:
    """What an admission plan depends on, short enough to be compared in every step."""

    step: int
    waiting: list[tuple[tuple[int, int], SequenceState | LegState]]
    running: int
    """Rows of running sequences."""
    holders: int
    """These, and transfers that are received."""
    available: Slots

    def is_no_better_than(self, refused: Glance) -> bool:
        """Whether the same ones wait and have no more to hope for than when they were refused: in
        the last few steps, for what others will need, or share with them, changes unseen.
        """
        return (
            min(refused.running, self.running) > 0
            and self.holders >= refused.holders
            and self.step < refused.step + LOOK_STEPS
            and all(map(le, self.available, refused.available))
            and self.waiting == refused.waiting
        )


@dataclass(eq=False, slots=True)
class Survey:
    """Reads the desk. A leg's key is its negated arrival number, a sequence's its own key."""

    desk: Desk
    waits: PrefixWaits
    demotion: Demotion | None
    incarnation: Incarnation
    """This worker."""
    _looked: tuple[int, Slots] = field(default=(0, ()))
    """Key and available slots of the last look that found nothing to share."""
    _glance: Glance | None = None
    """What the last items were made of."""
    _refused: Glance | None = None
    """The same, where their plan gave nobody anything."""

    def rows(self) -> list[Row]:
        """Running sequences that have at least one token to compute; its value may be the business
        of a step under way.
        """
        return [
            Row(
                one.key,
                (one.leg.arrival, one.choices[0]),
                one.tokens.length + one.draws_under_way - cache.history - one.under_way,
                one.last_step,
                one.demoted_steps,
            )
            for one, cache in self._runners()
            if not one.draws_under_way or one.feed is not None
        ]

    def _runners(self) -> list[tuple[Sequence, CacheSequence]]:
        running = SequenceState.RUNNING
        return [
            (one, one.cache)
            for one in self.desk.sequences.values()
            if one.state is running and one.cache is not None
        ]

    def ahead(self) -> Mapping[int, Ahead]:
        """Snapshot points before running sequences, by key."""
        if not self.desk.manager.keeps_states:
            return NO_POINTS
        return {
            sequence.key: Ahead(sequence.computed, points)
            for sequence in self.desk.sequences.values()
            if sequence.state is SequenceState.RUNNING
            and (points := _after(sequence.snapshot_points, sequence.computed))
        }

    def running_rows(self) -> int:
        """Rows that running sequences take in a step."""
        running = SequenceState.RUNNING
        return sum(
            [len(one.choices) for one in self.desk.sequences.values() if one.state is running]
        )

    def items(self) -> list[Item]:
        """What holds pages and will need more, and the oldest entrants. Empty without entrants, and
        while what the last plan refused would be refused again.
        """
        computing = LegState.COMPUTING  # most do, and looking a state up costs more
        legs = [leg for leg in self.desk.legs if leg.state is not computing]
        waiting = self._waiting(legs)
        if not waiting:
            return []
        receiving = [leg for leg in legs if leg.state in RECEIVING]
        running = self.running_rows()
        glance = self._glance = Glance(
            self.desk.counters.steps,
            [(arrival, one.state) for arrival, one in waiting],
            running,
            running + len(receiving),
            self.desk.manager.available_slots(),
        )
        if self._refused is not None and glance.is_no_better_than(self._refused):
            return []
        self._refused = None
        holders = [self._running(), *map(self._receiving, receiving)]
        return holders + [self._entrant(one) for _, one in waiting[:MAX_ENTRANTS]]

    def refused(self) -> None:
        """The plan of the last items gave nobody anything, and changed nothing for the next one."""
        self._refused = self._glance

    def share(self, items: list[Item], key: int) -> list[Item] | None:
        """The items with what ``key`` would share with others taken off its demand.

        None when it would share nothing, or nothing has changed since that was last seen.
        """
        available = self.desk.manager.available_slots()
        if self._looked == (key, available):
            return None
        one = self._find(key)
        leg = one if isinstance(one, LegRecord) else one.leg
        tokens = leg.prompt if isinstance(one, LegRecord) else one.tokens.span(0, len(one.tokens))
        cache = self.desk.manager.open(leg.scope, tokens, max_match=len(tokens) - 1)
        # What lies on the host takes slots like anything new.
        matched = self._held(leg, cache.matched_tokens if cache.is_resident else 0)
        pinned = _minus(available, self.desk.manager.available_slots())
        cache.close()
        saving = tuple(max(0, slots) for slots in _minus(matched, pinned))
        if isinstance(one, LegRecord):
            one.saving = saving
        if not any(saving):
            self._looked = (key, available)
            return None
        return [
            item._replace(demand=_less(item.demand, saving)) if item.key == key else item
            for item in items
        ]

    def _find(self, key: int) -> Sequence | LegRecord:
        if key > 0:
            return self.desk.sequences[key]
        return next(leg for leg in self.desk.legs if leg.arrival == -key)

    def _waiting(
        self, legs: Values[LegRecord]
    ) -> list[tuple[tuple[int, int], Sequence | LegRecord]]:
        """Entrants with their arrival, oldest first, those of ``legs`` among them."""
        running = SequenceState.RUNNING
        waiting: list[tuple[tuple[int, int], Sequence | LegRecord]] = [
            (sequence.arrival, sequence)
            for sequence in self.desk.sequences.values()
            if sequence.state is not running
            and sequence.state in SEQUENCE_PHASES
            and not self.waits.holds(sequence)
        ]
        waiting += [((leg.arrival, 0), leg) for leg in legs if leg.state in LEG_PHASES]
        waiting.sort(key=_FIRST)
        return waiting

    def _entrant(self, one: Sequence | LegRecord) -> Item:
        if isinstance(one, Sequence):
            demand = self._owed(one, 0)
            phase = SEQUENCE_PHASES[one.state]
            rows, lacking = len(one.choices), self.expected_tokens(one)
            arrival, passed = one.arrival, one.passed_slots
            demoted, borrows = one.demoted_steps, self._borrows(one.leg)
            return Item(one.key, phase, arrival, demand, rows, passed, lacking, demoted, borrows)
        choices = max(1, len(one.open_choices))
        demand = self._fresh(one, one.prompt_tokens, choices)
        if one.saving:
            demand = _less(demand, one.saving)
        arrival, phase = (one.arrival, 0), LEG_PHASES[one.state]
        borrows = phase is Phase.FETCHING and self._borrows(one)
        key, passed = -one.arrival, one.passed_slots
        return Item(key, phase, arrival, demand, choices, passed, borrows=borrows)

    def _borrows(self, leg: LegRecord) -> bool:
        """Whether a prompt may have room that was promised to others.

        Its own room at its destination is promised, so it ends if that keeps its promise. Workers
        that prefill for each other all promise their rooms away before any prompt starts; so
        prompts for a later one, in an order that all know, may start all the same. Whom they keep
        waiting then waits for a later worker only, and the last of them lends to nobody.
        """
        destination = leg.destination
        return destination is not None and str(self.incarnation) < str(destination)

    def expected_tokens(self, sequence: Sequence) -> int:
        """Tokens that a queued sequence has to compute, as far as is known: long prompts are looked
        up, once, where that decides on their place.
        """
        length = sequence.tokens.length
        if self.demotion is None or length <= self.demotion.uncached_tokens:
            return length
        if sequence.uncached_tokens is None:
            tokens = sequence.tokens.span(0, length)
            scope = sequence.leg.scope
            sequence.uncached_tokens = self.desk.manager.uncached_tokens(scope, tokens)
        return sequence.uncached_tokens

    def _running(self) -> Item:
        """What all running sequences will need, as one item."""
        block = self.desk.demand.tokens_per_block
        runners = self._runners()
        owed = [
            one.owed
            if one.owed_at == (-(-one.tokens.length // block), cache.capacity, len(one.choices))
            else self._owed(one, cache.capacity)
            for one, cache in runners
        ]
        owed.append((0,) * len(self.desk.manager.total_slots()))
        rows = sum([len(one.choices) for one, _ in runners])
        total = tuple([sum(slots) for slots in zip(*owed, strict=True)])
        return Item(0, Phase.RUNNING, (0, 0), total, rows)

    def _owed(self, sequence: Sequence, capacity: int) -> Slots:
        """What one sequence will need beyond ``capacity``; it changes where a block or a choice
        ends.
        """
        tokens = sequence.tokens.length
        now = (self.desk.demand.blocks(tokens), capacity, len(sequence.choices))
        if sequence.owed_at != now:
            fresh = self._fresh(sequence.leg, tokens, len(sequence.choices))
            sequence.owed = _less(fresh, self._held(sequence.leg, capacity))
            sequence.owed_at = now
        return sequence.owed

    def _receiving(self, leg: LegRecord) -> Item:
        choices = max(1, len(leg.open_choices))
        capacity = 0 if leg.landing is None else leg.landing.capacity
        demand = _less(
            self._fresh(leg, leg.prompt_tokens, choices),
            self._held(leg, capacity),
        )
        return Item(-leg.arrival, Phase.RECEIVING, (leg.arrival, 0), demand, choices)

    def _fresh(self, leg: LegRecord, tokens: int, choices: int) -> Slots:
        """Slots for the known tokens, a block to grow into, and the branches that will fork off."""
        if leg.kind == "context":
            return self._held(leg, leg.prompt_tokens)
        longest = leg.prompt_tokens + leg.output_limit - 1
        grown = max(tokens, min(tokens + self.desk.demand.tokens_per_block, longest))
        return self.desk.demand.fresh(grown, choices - 1)

    def _held(self, leg: LegRecord, capacity: int) -> Slots:
        """Most slots that ``capacity`` tokens of a leg have taken."""
        demand = self.desk.demand
        if leg.destination is None:
            return demand.peak(capacity)
        return demand.shipped(capacity, self.desk.manager.total_slots())


def _after(points: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    return tuple(point for point in points if point > tokens)


def _minus(left: Slots, right: Slots) -> Slots:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _less(demand: Slots, have: Slots) -> Slots:
    return tuple(max(0, need) for need in _minus(demand, have))
