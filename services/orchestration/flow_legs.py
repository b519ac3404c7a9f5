"""Legs of a request: which worker was asked for what under which id, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from transfer.identity import Incarnation
from worker.messages import Leg, LegEnded


class LegStatus(Enum):
    """A leg runs until its worker reports its end or is lost; nothing else ends it."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    BROKEN = "broken"
    """Failed, rejected, cancelled or lost with its worker."""


@dataclass
class FlowLeg:
    """One leg on one worker."""

    leg_id: str
    kind: Leg
    worker: Incarnation
    receives_pages: bool = False
    """A generation leg with a source; otherwise the leg computes the prompt itself."""
    status: LegStatus = LegStatus.RUNNING
    ended: LegEnded | None = None
    """None while it runs and when its worker was lost."""
    emitted: bool = False
    """It gave at least one run."""

    @property
    def running(self) -> bool:
        """Whether its end is still to come."""
        return self.status is LegStatus.RUNNING

    def end(self, ended: LegEnded) -> None:
        """Take in the leg's terminal event."""
        self.ended = ended
        succeeded = ended.outcome == "succeeded"
        self.status = LegStatus.SUCCEEDED if succeeded else LegStatus.BROKEN


class FlowLegs:
    """All legs of one request; the current ones serve it, the others are only waited for."""

    def __init__(self) -> None:
        self.context: FlowLeg | None = None
        self.generation: FlowLeg | None = None
        self._given_up: list[FlowLeg] = []

    def all(self) -> Iterator[FlowLeg]:
        """Current legs first."""
        yield from self.current()
        yield from self._given_up

    def current(self) -> tuple[FlowLeg, ...]:
        """The legs whose output counts."""
        return tuple(leg for leg in (self.context, self.generation) if leg is not None)

    def running(self) -> tuple[FlowLeg, ...]:
        """Every leg that has not ended."""
        return tuple(leg for leg in self.all() if leg.running)

    def give_up(self) -> tuple[FlowLeg, ...]:
        """Nothing of the current legs counts from now on. Returns those that still run."""
        current = self.current()
        self._given_up.extend(current)
        self.context = self.generation = None
        return tuple(leg for leg in current if leg.running)

    def source_of(self, leg_id: str, worker: Incarnation) -> FlowLeg | None:
        """The current leg that a run of ``leg_id`` from ``worker`` belongs to."""
        generation, context = self.generation, self.context
        if generation is not None and generation.leg_id == leg_id and generation.worker == worker:
            return generation
        if context is not None and context.leg_id == leg_id and context.worker == worker:
            return context
        return None

    def find(self, leg_id: str, kind: Leg, worker: Incarnation) -> FlowLeg | None:
        """Any leg, also one that was given up."""
        for leg in self.all():
            if leg.leg_id == leg_id and leg.kind == kind and leg.worker == worker:
                return leg
        return None
