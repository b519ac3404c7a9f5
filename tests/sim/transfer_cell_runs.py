"""Brings a world to one cell: the state is reached, the cancellation comes there, the fault happens
around it, and all three are proved.

``python -m tests.sim.transfer_cell_runs NAME VARIANT`` runs one again and prints its story.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Final

from tests.sim.transfer_agent import Handled, Stray
from tests.sim.transfer_cells import (
    BY_NAME,
    CELLS,
    LATE_IN_DOUBT,
    RECIPES,
    UNKNOWN,
    Cell,
    Fault,
    Opening,
    Way,
    death_at_once,
)
from tests.sim.transfer_network import Link
from tests.sim.transfer_process import CONTEXT, GENERATION
from tests.sim.transfer_terrain import TERRAINS, WHOLE
from tests.sim.transfer_trials import trial
from tests.sim.transfer_world import Rank, World
from transfer.messages import CancelSession
from transfer.outcome import Outcome
from transfer.session import CLOSING_STATES, Session, SessionState
from transfer.session_events import PostEnded

REPLAY: Final = "python -m tests.sim.transfer_cell_runs"
REQUEST: Final = "r"
VARIANTS: Final = 3
"""The fault comes right before the cancellation, right after it (a death when pages have moved),
and a little later; where it cannot come before, right after it. Each on another terrain.
"""
LATER_MS: Final = 10
MOVED_MS: Final = 30
"""When pages have moved that nobody was told of."""
LOOK_MS: Final = 5
SHORT_MS, LONG_MS = 100, 1_500
"""Less than sessions wait for their peer, and more."""
STRETCH_MS: Final = (300, 300)
BEGINS: Final = (SessionState.SHIPPING, SessionState.RECEIVING)
"""The last variant comes when the first pages are about to move, not when they do."""
DIES: Final = {Fault.CONTEXT_DIES: CONTEXT, Fault.GENERATION_DIES: GENERATION}


class CellRun:
    """One variant of one cell."""

    def __init__(self, cell: Cell, variant: int) -> None:
        self.cell = cell
        self.variant = variant
        self.side, self.way, self.state, self.opening = cell.moment
        self.fault = cell.fault
        self.recipe = RECIPES[cell.moment]
        if self.fault is Fault.LATE:
            self.recipe = LATE_IN_DOUBT.get(cell.moment, self.recipe)
        if variant == 2 and self.state in BEGINS:
            self.recipe = replace(self.recipe, moving=False)
        weather, script = self.recipe.weather, self.recipe.script
        if self.fault is Fault.DUPLICATE:
            weather = replace(weather, copy_chance=1.0)
        if self.state is not SessionState.DOUBT and variant == 2:
            weather = replace(weather, remote_access=False)
        self.before = self._comes_before()
        if variant == 1 and self.fault in DIES and self.state is not SessionState.DOUBT:
            weather = death_at_once(weather)
        if self.way is Way.TOLD and self.fault is Fault.LATE and self.before:
            # Whatever is late must find the state that it was sent into.
            script = replace(
                script,
                prefill_ms=STRETCH_MS,
                allocate_ms=STRETCH_MS,
                chunk_ms=STRETCH_MS if max(script.chunk_ms) else script.chunk_ms,
            )
        self.script = script
        number = CELLS.index(cell)
        terrain = TERRAINS[(number + variant) % len(TERRAINS)]
        if self.state is SessionState.DOUBT:
            # Of pages that are staged only the buffer comes in doubt.
            terrain = WHOLE
        hears_ms = (3, 12) if variant == 1 else (0, 0)
        self.world = World(1_000 * number + variant, terrain, weather, hears_ms=hears_ms)
        self.world.watches += [self._watch, self._look]
        self.ranks = tuple(self.world.ranks)
        self.deeds_done = False
        self.looking = False
        self.hits: list[SessionState | str] = []
        """States in which the cancellation came."""
        self.outcome_then = Outcome.PENDING
        self.struck = 0
        self.copies_then = self.held_then = 0
        self.late_ends = 0

    @property
    def rank(self) -> Rank:
        """Where the cancellation comes."""
        return self.ranks[self.side]

    @property
    def link(self) -> Link:
        return self.world.links[0]

    def run(self) -> None:
        """Raises TrialFailed when something is wrong, or the cell was missed."""
        replay = f"{REPLAY} {self.cell.name} {self.variant}"
        with trial(self.world, f"{self.cell.name}, variant {self.variant}", replay):
            self._begin()
            self.world.clock.run()
            self._check_hit()
            self._check_fault()
            self._check_ends()
            self.world.finish()
            self._ask_again()

    def _comes_before(self) -> bool:
        """Whether the fault comes before the cancellation does."""
        if self.fault is Fault.LATE and self.way is Way.TOLD and self.state is SessionState.CLOSED:
            return True
        if self.variant or self.fault is Fault.DUPLICATE or self.state is SessionState.DOUBT:
            return False
        if self.fault is Fault.LOST:
            return self.way is Way.ASKED
        return DIES.get(self.fault) != self.side

    def _begin(self) -> None:
        if self.opening is Opening.PULL:
            self.ranks[CONTEXT].engine.remember(self.script.whole_blocks)
        start = partial(self.world.start, REQUEST, self.script, *self.world.instances)
        if self.state != UNKNOWN:
            start()
        elif self.side == GENERATION:
            self._cancel()
            start()
        else:
            start()
            self._cancel()

    # On the way.

    def _watch(self, seen: Handled | Stray) -> None:
        if seen.process is not self.rank.process or self.state == UNKNOWN:
            return
        if isinstance(seen, Stray):
            if isinstance(seen.message, CancelSession):
                self._told(SessionState.CLOSED)
            return
        if isinstance(seen.event, CancelSession):
            self._told(seen.before)
        if isinstance(seen.event, PostEnded) and seen.before is SessionState.DOUBT:
            self.late_ends += bool(self.hits)
        if self.deeds_done and self.way is Way.ASKED and self.state is seen.session.state:
            self.world.clock.after(0, partial(self._cancel_in, seen.session))

    def _look(self, seen: Handled | Stray) -> None:
        """Whether it is time for the deeds: either end may have brought that about."""
        session = self.rank.agent.session(REQUEST)
        if session is None or self.deeds_done:
            return
        if self._is_time(session):
            self.world.clock.after(0, partial(self._do_deeds, session))
        elif session.state is self.recipe.at and not self.looking:
            # Pages begin to move without a word of either session.
            self.looking = True
            self.world.clock.after(LOOK_MS, partial(self._look_again, seen))

    def _look_again(self, seen: Handled | Stray) -> None:
        self.looking = False
        self._look(seen)

    def _is_time(self, session: Session) -> bool:
        recipe = self.recipe
        is_there = session.state is recipe.at and (not recipe.moving or self.link.moving)
        # Who tells of a cancellation has to know the request.
        teller = self.ranks[1 - self.side].agent.session(REQUEST)
        can_tell = self.way is Way.ASKED or teller is not None
        return is_there and can_tell and not self.deeds_done

    def _do_deeds(self, session: Session) -> None:
        recipe = self.recipe
        if not self._is_time(session):
            return
        self.deeds_done = True
        for side, deed in recipe.deeds:
            match deed:
                case "cut":
                    self.world.cut(self.ranks[side])
                case "hold":
                    self.world.hold(self.ranks[side], 2 * LONG_MS)
                case _:
                    self.world.act(self.ranks[side], REQUEST, deed)
        if self.way is Way.TOLD:
            self._note()
            if self.before:
                self._strike()
        elif session.state is self.state:
            self._cancel_in(session)

    def _cancel_in(self, session: Session) -> None:
        if session.state is self.state and not self.hits:
            self.outcome_then = session.outcome
            self._cancel()

    def _cancel(self) -> None:
        self._note()
        if self.before:
            self._strike()
        session = self.rank.agent.session(REQUEST)
        if session is not None:
            self.hits.append(session.state)
        else:
            was_there = REQUEST in self.rank.agent.forgotten
            self.hits.append(SessionState.CLOSED if was_there else UNKNOWN)
        self.world.act(self.rank, REQUEST, "cancel")
        if self.fault is Fault.DUPLICATE:
            self.world.act(self.rank, REQUEST, "cancel")
        self._after()

    def _told(self, state: SessionState) -> None:
        if self.way is Way.ASKED or self.hits:
            return
        self.hits.append(state)
        session = self.rank.agent.session(REQUEST)
        if state in CLOSING_STATES:
            self.outcome_then = session.outcome if session is not None else Outcome.FAILED
        self.world.clock.after(0, self._after)

    def _note(self) -> None:
        if self.world.links:
            self.copies_then, self.held_then = self.link.copies, self.link.held_up

    def _after(self) -> None:
        if not self.before and self.fault is not Fault.DUPLICATE:
            self.world.clock.after(self._wait_ms(), self._strike)

    def _wait_ms(self) -> int:
        """From the cancellation until the fault."""
        if self.fault is Fault.LATE:
            return 0
        if self.variant == 1 and self.fault in DIES:
            return MOVED_MS
        return LATER_MS if self.variant == 2 else 0

    def _strike(self) -> None:
        world = self.world
        match self.fault:
            case Fault.LOST:
                self.struck += not self.link.is_cut
                world.cut(self.rank)
            case Fault.LATE:
                self.struck += 1
                world.hold(self.rank, LONG_MS if self.variant == 2 else SHORT_MS)
            case fault:
                victim = self.ranks[DIES[fault]]
                self.struck += victim.process.alive
                world.kill(victim)

    # Proofs.

    def _check_hit(self) -> None:
        assert self.hits, f"no cancellation came in state {self.state}"
        assert self.hits == [self.state], f"it came in state {self.hits}"

    def _check_fault(self) -> None:
        match self.fault:
            case Fault.DUPLICATE:
                if self.state not in (SessionState.DOUBT, UNKNOWN):
                    assert self.link.copies > self.copies_then, "nothing arrived twice"
            case Fault.LATE:
                late = self.late_ends or self.link.held_up > self.held_then
                assert self.struck == 1
                assert late, "nothing was late"
            case Fault.LOST:
                assert self.struck == 1
                assert not any(
                    is_open and rank.process.alive
                    for is_open, rank in zip(self.link.open, self.ranks, strict=True)
                ), "the loss was not noticed"
            case fault:
                assert self.struck == 1
                assert not self.ranks[DIES[fault]].process.alive

    def _check_ends(self) -> None:
        """Undecided, it is cancelled; decided, it stays what it was."""
        ends = self.world.ends(self.rank, REQUEST)
        if self.rank.process.alive:
            expected = self.outcome_then
            if self.state not in CLOSING_STATES:
                expected = Outcome.CANCELLED
            if self.state == UNKNOWN and not self.rank.agent.started[REQUEST]:
                assert self.fault in (Fault.LOST, Fault.GENERATION_DIES), "no grant came"
            else:
                assert [end.outcome for end in ends] == [expected], ends
        if self._undisturbed():
            for rank in self.ranks:
                assert not rank.agent.drops, "a connection was dropped for nothing"
                assert not rank.engine.quarantines, "pages came in doubt for nothing"

    def _undisturbed(self) -> bool:
        """Whether everything that is under way arrives in time."""
        short = self.fault is Fault.LATE and self.variant != 2
        return self.state is not SessionState.DOUBT and (self.fault is Fault.DUPLICATE or short)

    def _ask_again(self) -> None:
        """A cancellation is not meant for a later request with the same id."""
        if not self._undisturbed():
            return
        self.world.start(REQUEST, self.script, *self.world.instances)
        self.world.finish()
        for rank in self.ranks:
            last = self.world.ends(rank, REQUEST)[-1]
            assert last.outcome is Outcome.SUCCEEDED, f"asked again: {last}"


def run_cell(cell: Cell) -> None:
    """All variants of a cell. Raises TrialFailed."""
    for variant in range(VARIANTS):
        CellRun(cell, variant).run()


if __name__ == "__main__":
    once = CellRun(BY_NAME[sys.argv[1]], int(sys.argv[2]))
    once.run()
    print(once.world.story())
