"""The desk as the scheduler sees it: items that want pages, rows that want to compute.

Demands are careful: they count every block of a prompt although others may hold some of it. Where
that alone keeps the next item out, ``share`` finds out by looking what it would really share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from worker.desk import Desk
from worker.prefix_waits import PrefixWaits
from worker.requests import LegRecord, LegState, Sequence, SequenceState
from worker.scheduler import Item, Phase, Row, Slots

MAX_ENTRANTS: Final = 256
"""Items beyond the oldest this many are not looked at in one plan: they could not be served
anyway.
"""

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


@dataclass(eq=False, slots=True)
class Survey:
    """Reads the desk. A leg's key is its negated arrival number, a sequence's its own key."""

    desk: Desk
    waits: PrefixWaits
    _looked: tuple[int, Slots] = field(default=(0, ()))
    """Key and available slots of the last look that found nothing to share."""

    def rows(self) -> list[Row]:
        """Running sequences that have at least one token to compute; its value may be the business
        of a step under way.
        """
        return [
            Row(
                sequence.key,
                sequence.arrival,
                len(sequence.tokens) + sequence.draws_under_way - sequence.next_position,
                sequence.last_step,
                sequence.demoted_steps,
            )
            for sequence in self.desk.sequences.values()
            if sequence.state is SequenceState.RUNNING
            and (not sequence.draws_under_way or sequence.feed is not None)
        ]

    def running_rows(self) -> int:
        """Rows that running sequences take in a step."""
        return sum(
            [
                len(sequence.choices)
                for sequence in self.desk.sequences.values()
                if sequence.state is SequenceState.RUNNING
            ]
        )

    def items(self) -> list[Item]:
        """What holds pages and will need more, and the oldest entrants. Empty without entrants."""
        entrants = self._entrants()
        if not entrants:
            return []
        items = [self._running()]
        items += [
            self._receiving(leg)
            for leg in self.desk.legs
            if leg.state is not LegState.COMPUTING and leg.state in RECEIVING
        ]
        return items + entrants

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
        matched = self.desk.demand.peak(cache.matched_tokens if cache.is_resident else 0)
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

    def _entrants(self) -> list[Item]:
        running = SequenceState.RUNNING  # most are, and looking a state up costs more
        waiting: list[tuple[tuple[int, int], Sequence | LegRecord]] = [
            (sequence.arrival, sequence)
            for sequence in self.desk.sequences.values()
            if sequence.state is not running
            and sequence.state in SEQUENCE_PHASES
            and not self.waits.holds(sequence)
        ]
        computing = LegState.COMPUTING
        waiting += [
            ((leg.arrival, 0), leg)
            for leg in self.desk.legs
            if leg.state is not computing and leg.state in LEG_PHASES
        ]
        waiting.sort(key=lambda pair: pair[0])
        return [self._entrant(one) for _, one in waiting[:MAX_ENTRANTS]]

    def _entrant(self, one: Sequence | LegRecord) -> Item:
        if isinstance(one, Sequence):
            demand = self._owed(one)
            phase = SEQUENCE_PHASES[one.state]
            rows = len(one.choices)
            return Item(one.key, phase, one.arrival, demand, rows, one.passed_slots)
        choices = max(1, len(one.open_choices))
        demand = self._fresh(one, one.prompt_tokens, choices)
        if one.saving:
            demand = _less(demand, one.saving)
        arrival, phase = (one.arrival, 0), LEG_PHASES[one.state]
        return Item(-one.arrival, phase, arrival, demand, choices, one.passed_slots)

    def _running(self) -> Item:
        """What all running sequences will need, as one item."""
        rows, total = 0, [0] * len(self.desk.manager.total_slots())
        for sequence in self.desk.sequences.values():
            if sequence.state is not SequenceState.RUNNING:
                continue
            rows += len(sequence.choices)
            for pool_group, slots in enumerate(self._owed(sequence)):
                total[pool_group] += slots
        return Item(0, Phase.RUNNING, (0, 0), tuple(total), rows)

    def _owed(self, sequence: Sequence) -> Slots:
        """What one sequence will need; it changes where a block or a choice ends."""
        cache = sequence.cache if sequence.state is SequenceState.RUNNING else None
        capacity = 0 if cache is None else cache.capacity
        tokens = len(sequence.tokens)
        now = (self.desk.demand.blocks(tokens), capacity, len(sequence.choices))
        if sequence.owed_at != now:
            fresh = self._fresh(sequence.leg, tokens, len(sequence.choices))
            sequence.owed = _less(fresh, self.desk.demand.peak(capacity))
            sequence.owed_at = now
        return sequence.owed

    def _receiving(self, leg: LegRecord) -> Item:
        choices = max(1, len(leg.open_choices))
        capacity = 0 if leg.landing is None else leg.landing.capacity
        demand = _less(
            self._fresh(leg, leg.prompt_tokens, choices),
            self.desk.demand.peak(capacity),
        )
        return Item(-leg.arrival, Phase.RECEIVING, (leg.arrival, 0), demand, choices)

    def _fresh(self, leg: LegRecord, tokens: int, choices: int) -> Slots:
        """Slots for the known tokens, a block to grow into, and the branches that will fork off."""
        if leg.kind == "context":
            return self.desk.demand.peak(leg.prompt_tokens)
        longest = leg.prompt_tokens + leg.output_limit - 1
        grown = max(tokens, min(tokens + self.desk.demand.tokens_per_block, longest))
        return self.desk.demand.fresh(grown, choices - 1)


def _minus(left: Slots, right: Slots) -> Slots:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _less(demand: Slots, have: Slots) -> Slots:
    return tuple(max(0, need) for need in _minus(demand, have))
