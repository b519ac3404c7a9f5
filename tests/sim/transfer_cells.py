"""Every state in which a cancellation can come, at either end, and how a world gets there.

A cancellation is *asked* by the engine or *told* by the peer. ``UNKNOWN`` is no session state: the
request has not come to this end yet. Each moment is crossed with each fault of ``FAULTS``;
what cannot occur is listed with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from tests.sim.transfer_engine import Script
from tests.sim.transfer_network import Weather
from tests.sim.transfer_process import CONTEXT, GENERATION
from tests.sim.transfer_terrain import BLOCK
from transfer.session import SessionState

S = SessionState
UNKNOWN: Final = "unknown"


class Way(Enum):
    """How a cancellation comes to a session."""

    ASKED = "asked"
    TOLD = "told"


class Fault(Enum):
    """What goes wrong around the cancellation."""

    CONTEXT_DIES = "context dies"
    GENERATION_DIES = "generation dies"
    LOST = "lost"
    """The connection breaks; what is under way is gone."""
    DUPLICATE = "duplicate"
    """The cancellation is asked twice, and every message arrives again later."""
    LATE = "late"
    """Whatever is under way is held up, for less or for more than sessions wait."""


class Opening(Enum):
    """How sessions begin, with what their ends are called."""

    GRANT = ("context", "generation")
    PULL = ("source", "puller")


class Moment(NamedTuple):
    """A cancellation that comes to ``side`` in ``state``."""

    side: int
    way: Way
    state: SessionState | str
    opening: Opening = Opening.GRANT

    @property
    def name(self) -> str:
        """For test ids."""
        state = self.state if isinstance(self.state, str) else self.state.value
        return f"{self.way.value}-{self.opening.value[self.side]}-{state}".replace(" ", "-")


_SCRIPT: Final = Script(
    prompt=tuple(range(8 * BLOCK - 3)),
    prefill_ms=(30, 30),
    chunk_ms=(30, 30),
    allocate_ms=(30, 30),
)
_WEATHER: Final = Weather(
    delay_ms=(2, 4),
    copy_delay_ms=(0, 60),
    move_ms=(20, 35),
    finish_ms=(0, 30),
    notice_ms=(5, 40),
    death_told_ms=(50, 400),
)


@dataclass(frozen=True)
class Recipe:
    """How a world comes to the moment. ``deeds`` happen when its side is first in ``at``, in this
    order, as (side, deed): "cancel", "fail", "cut" or "hold".
    """

    at: SessionState | None
    moving: bool = False
    """Only once pages are under way that both ends have posted."""
    deeds: tuple[tuple[int, str], ...] = ()
    script: Script = _SCRIPT
    weather: Weather = _WEATHER


_QUICK: Final = replace(_SCRIPT, chunk_ms=(0, 0), chunk_blocks=8)
_STREAM: Final = replace(_SCRIPT, chunk_blocks=1, chunk_ms=(12, 12), allocate_ms=(0, 0))
"""Chunks cross whatever the receiver says."""
_ENDS_EARLY: Final = replace(_SCRIPT, no_decode=True)
_SLOW_MOVES: Final = replace(_WEATHER, move_ms=(60, 90))
_COMPUTED: Final = replace(_QUICK, allocate_ms=(60, 60))
_DOUBTS: Final = replace(_SLOW_MOVES, notice_ms=(5, 10), teardown_ms=(0, 10), endings_ms=(0, 10))
_C, _G = CONTEXT, GENERATION

_OF_GRANTS: Final[Mapping[Moment, Recipe]] = {
    Moment(_C, Way.ASKED, UNKNOWN): Recipe(None),
    Moment(_C, Way.ASKED, S.GRANTED): Recipe(S.GRANTED),
    Moment(_C, Way.ASKED, S.ANNOUNCED): Recipe(S.ANNOUNCED),
    Moment(_C, Way.ASKED, S.COMPUTED): Recipe(S.COMPUTED, script=_COMPUTED),
    Moment(_C, Way.ASKED, S.SHIPPING): Recipe(S.SHIPPING, moving=True),
    Moment(_C, Way.ASKED, S.HANDED_OFF): Recipe(S.HANDED_OFF, moving=True),
    Moment(_C, Way.ASKED, S.CLOSING): Recipe(
        S.CLOSING, moving=True, script=_ENDS_EARLY, weather=_SLOW_MOVES
    ),
    Moment(_C, Way.ASKED, S.DOUBT): Recipe(
        S.SHIPPING, moving=True, deeds=((_C, "cut"),), weather=_DOUBTS
    ),
    Moment(_C, Way.ASKED, S.CLOSED): Recipe(S.ANNOUNCED, deeds=((_C, "fail"),)),
    Moment(_C, Way.TOLD, S.GRANTED): Recipe(S.GRANTED, deeds=((_G, "cancel"),)),
    Moment(_C, Way.TOLD, S.ANNOUNCED): Recipe(S.ANNOUNCED, deeds=((_G, "cancel"),)),
    Moment(_C, Way.TOLD, S.COMPUTED): Recipe(S.COMPUTED, deeds=((_G, "cancel"),), script=_COMPUTED),
    Moment(_C, Way.TOLD, S.SHIPPING): Recipe(S.SHIPPING, moving=True, deeds=((_G, "cancel"),)),
    Moment(_C, Way.TOLD, S.HANDED_OFF): Recipe(
        S.HANDED_OFF, moving=True, deeds=((_G, "cancel"),), weather=_SLOW_MOVES
    ),
    Moment(_C, Way.TOLD, S.CLOSING): Recipe(
        S.SHIPPING,
        moving=True,
        deeds=((_G, "cancel"), (_C, "fail")),
        weather=_SLOW_MOVES,
    ),
    Moment(_C, Way.TOLD, S.CLOSED): Recipe(S.ANNOUNCED, deeds=((_G, "cancel"), (_C, "fail"))),
    Moment(_G, Way.ASKED, UNKNOWN): Recipe(None),
    Moment(_G, Way.ASKED, S.GRANTED): Recipe(S.GRANTED),
    Moment(_G, Way.ASKED, S.ANNOUNCED): Recipe(S.ANNOUNCED),
    Moment(_G, Way.ASKED, S.RECEIVING): Recipe(S.RECEIVING, moving=True, script=_STREAM),
    Moment(_G, Way.ASKED, S.COMPLETING): Recipe(S.COMPLETING, moving=True),
    Moment(_G, Way.ASKED, S.CLOSING): Recipe(
        S.CLOSING, moving=True, script=_ENDS_EARLY, weather=_SLOW_MOVES
    ),
    Moment(_G, Way.ASKED, S.DOUBT): Recipe(
        S.RECEIVING, moving=True, deeds=((_G, "cut"),), weather=_DOUBTS
    ),
    Moment(_G, Way.ASKED, S.CLOSED): Recipe(S.GRANTED, deeds=((_G, "fail"),)),
    Moment(_G, Way.TOLD, S.GRANTED): Recipe(S.GRANTED, deeds=((_C, "cancel"),)),
    Moment(_G, Way.TOLD, S.ANNOUNCED): Recipe(S.ANNOUNCED, deeds=((_C, "cancel"),)),
    Moment(_G, Way.TOLD, S.RECEIVING): Recipe(S.RECEIVING, moving=True, deeds=((_C, "cancel"),)),
    Moment(_G, Way.TOLD, S.COMPLETING): Recipe(
        S.COMPLETING, moving=True, deeds=((_C, "cancel"),), weather=_SLOW_MOVES
    ),
    Moment(_G, Way.TOLD, S.CLOSING): Recipe(
        S.RECEIVING,
        moving=True,
        deeds=((_C, "cancel"), (_G, "fail")),
        weather=_SLOW_MOVES,
    ),
    Moment(_G, Way.TOLD, S.CLOSED): Recipe(S.GRANTED, deeds=((_C, "cancel"), (_G, "fail"))),
}


def _of_pull(moment: Moment) -> Moment:
    """The same moment of a pull: in place of the grant there is the question."""
    state = S.ASKED if moment.state is S.GRANTED else moment.state
    return Moment(moment.side, moment.way, state, Opening.PULL)


def _pulling(recipe: Recipe) -> Recipe:
    """Pages that are gathered move long after they are given; the handoff comes after that."""
    at = S.ASKED if recipe.at is S.GRANTED else recipe.at
    step_ms = (100, 100) if max(recipe.script.chunk_ms) else (0, 0)
    return replace(recipe, at=at, script=replace(recipe.script, least_blocks=2, chunk_ms=step_ms))


_GIVEN_UP: Final[Mapping[Moment, Recipe]] = {
    Moment(_C, Way.ASKED, S.HANDED_OFF): Recipe(S.HANDED_OFF, moving=True, script=_COMPUTED),
    Moment(_C, Way.TOLD, S.HANDED_OFF): Recipe(
        S.HANDED_OFF,
        moving=True,
        deeds=((_G, "cancel"),),
        script=_COMPUTED,
        weather=_SLOW_MOVES,
    ),
    Moment(_G, Way.ASKED, S.COMPLETING): Recipe(S.COMPLETING, moving=True, script=_QUICK),
    Moment(_G, Way.TOLD, S.COMPLETING): Recipe(
        S.COMPLETING,
        moving=True,
        deeds=((_C, "cancel"),),
        script=_QUICK,
        weather=_SLOW_MOVES,
    ),
    Moment(_C, Way.ASKED, S.CLOSING): Recipe(
        S.SHIPPING, moving=True, deeds=((_C, "fail"),), weather=_SLOW_MOVES
    ),
    Moment(_G, Way.ASKED, S.CLOSING): Recipe(
        S.RECEIVING, moving=True, deeds=((_G, "fail"),), weather=_SLOW_MOVES
    ),
}
"""Where a pull comes to a moment in another way: nothing is computed, and it always hands off."""
_OF_PULLS: Final[Mapping[Moment, Recipe]] = {
    _of_pull(moment): _pulling(recipe) for moment, recipe in {**_OF_GRANTS, **_GIVEN_UP}.items()
}
RECIPES: Final[Mapping[Moment, Recipe]] = {**_OF_GRANTS, **_OF_PULLS}
"""Every moment that can come, and the way to it."""

_GIVES_UP: Final = replace(
    _SLOW_MOVES, teardown_ms=(1_000, 1_000), endings_ms=(1_000, 1_000), remote_access=False
)
"""Requests end long after their session has given up waiting for them."""
_LATE_OF_GRANTS: Final[Mapping[Moment, Recipe]] = {
    Moment(_C, Way.ASKED, S.DOUBT): Recipe(
        S.SHIPPING, moving=True, deeds=((_C, "hold"), (_C, "fail")), weather=_GIVES_UP
    ),
    Moment(_G, Way.ASKED, S.DOUBT): Recipe(
        S.RECEIVING, moving=True, deeds=((_G, "hold"), (_G, "fail")), weather=_GIVES_UP
    ),
}
LATE_IN_DOUBT: Final[Mapping[Moment, Recipe]] = {
    **_LATE_OF_GRANTS,
    **{_of_pull(moment): _pulling(recipe) for moment, recipe in _LATE_OF_GRANTS.items()},
}
"""Doubt into which requests still end: the only thing that can be late there."""

_NEVER: Final[Mapping[Moment, str]] = {
    Moment(_C, Way.ASKED, S.NEW): "a session takes its opening in the turn that makes it",
    Moment(_G, Way.ASKED, S.NEW): "a session sends its opening in the turn that makes it",
    Moment(_C, Way.TOLD, S.DOUBT): "doubt begins when the connection is gone, messages and all",
}
NEVER: Final[Mapping[Moment, str]] = {
    **_NEVER,
    **{_of_pull(moment): reason for moment, reason in _NEVER.items()},
}
"""Moments that the tables provide for and no shell can bring about."""

IMPOSSIBLE: Final[Mapping[tuple[Moment, Fault], str]] = {
    **{
        (Moment(side, Way.ASKED, S.DOUBT, opening), Fault.LOST): "doubt begins when the connection "
        "is lost"
        for opening in Opening
        for side in (_C, _G)
    },
    **{
        (Moment(_G, Way.ASKED, UNKNOWN, opening), fault): "what was cancelled before its opening "
        "has nothing to do with the other end"
        for opening in Opening
        for fault in (Fault.CONTEXT_DIES, Fault.LOST, Fault.LATE)
    },
}
"""Faults that cannot meet a moment."""


def death_at_once(weather: Weather) -> Weather:
    """A death is known before the requests that it broke are told as ended."""
    return replace(
        weather,
        death_told_ms=(0, 20),
        teardown_ms=(0, 5),
        finish_ms=(20, 30),
        endings_ms=(60, 90),
    )


class Cell(NamedTuple):
    """One moment with one fault."""

    moment: Moment
    fault: Fault

    @property
    def name(self) -> str:
        """For test ids and replays."""
        return f"cancel-{self.moment.name}-{self.fault.value}".replace(" ", "-")


CELLS: Final = tuple(
    Cell(moment, fault)
    for moment in RECIPES
    for fault in Fault
    if (moment, fault) not in IMPOSSIBLE
)
BY_NAME: Final = {cell.name: cell for cell in CELLS}
