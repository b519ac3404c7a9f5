"""A cancellation in every state of either end, with every fault: each cell by name.

Each run proves that the state was reached when the cancellation came and that the fault happened;
``transfer_world`` says what must hold then.
"""

from __future__ import annotations

import pytest

from tests.sim.transfer_cell_runs import run_cell
from tests.sim.transfer_cells import (
    CELLS,
    IMPOSSIBLE,
    LATE_IN_DOUBT,
    NEVER,
    RECIPES,
    UNKNOWN,
    Cell,
    Fault,
    Moment,
    Opening,
    Way,
)
from tests.sim.transfer_process import CONTEXT, GENERATION
from transfer.context_session import CONTEXT_IMPOSSIBLE, CONTEXT_TRANSITIONS
from transfer.generation_session import GENERATION_IMPOSSIBLE, GENERATION_TRANSITIONS
from transfer.messages import CancelSession
from transfer.pull_session import PULL_IMPOSSIBLE, PULL_TRANSITIONS
from transfer.session_events import CancelRequested
from transfer.source_session import SOURCE_IMPOSSIBLE, SOURCE_TRANSITIONS

TABLES = {
    (CONTEXT, Opening.GRANT): CONTEXT_TRANSITIONS,
    (GENERATION, Opening.GRANT): GENERATION_TRANSITIONS,
    (CONTEXT, Opening.PULL): SOURCE_TRANSITIONS,
    (GENERATION, Opening.PULL): PULL_TRANSITIONS,
}
REFUSED = {
    (CONTEXT, Opening.GRANT): CONTEXT_IMPOSSIBLE,
    (GENERATION, Opening.GRANT): GENERATION_IMPOSSIBLE,
    (CONTEXT, Opening.PULL): SOURCE_IMPOSSIBLE,
    (GENERATION, Opening.PULL): PULL_IMPOSSIBLE,
}
EVENTS = {Way.ASKED: CancelRequested, Way.TOLD: CancelSession}


def test_the_moments_are_those_of_the_session_tables() -> None:
    """A state or an event that is added to a session shows here."""
    provided = {
        Moment(side, way, state, opening)
        for (side, opening), table in TABLES.items()
        for way, event in EVENTS.items()
        for state, kind in table
        if kind is event
    }
    before = {Moment(side, Way.ASKED, UNKNOWN, opening) for side, opening in TABLES}
    assert set(RECIPES) | set(NEVER) == provided | before
    assert not set(RECIPES) & set(NEVER)


@pytest.mark.parametrize("end", TABLES, ids=lambda end: end[1].value[end[0]])
def test_every_state_either_takes_a_cancellation_or_refuses_it(end: tuple[int, Opening]) -> None:
    states = {state for state, _ in TABLES[end]}
    for way, event in EVENTS.items():
        taken = {state for state, kind in TABLES[end] if kind is event}
        refused = {state for state, kinds in REFUSED[end].items() if event in kinds}
        assert taken | refused == states
        assert not taken & refused
        assert way is Way.TOLD or taken == states, "a cancellation must be accepted in every state"


def test_every_moment_meets_every_fault_or_has_a_reason() -> None:
    every = {Cell(moment, fault) for moment in RECIPES for fault in Fault}
    assert set(CELLS) | {Cell(*pair) for pair in IMPOSSIBLE} == every
    assert len({cell.name for cell in CELLS}) == len(CELLS) == len(every) - len(IMPOSSIBLE)
    assert set(LATE_IN_DOUBT) <= set(RECIPES)
    assert all([*NEVER.values(), *IMPOSSIBLE.values()])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    run_cell(cell)
