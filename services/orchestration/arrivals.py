"""Which workers have arrived: ready by their own word, and connected to their counterparts.

A ready worker waits for the pairs with every other ready one, and no longer than its patience: a
pair that cannot be connected is told of and holds nobody back for ever. Who has arrived stays so
for the life of its incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from services.orchestration.worker_link import WorkerLink
from transfer.identity import Incarnation

NOT_TOLD: Final = "not dialled yet"


@dataclass(frozen=True, slots=True)
class MissingPair:
    """A generation worker that cannot take pages of a context worker yet."""

    generation: Incarnation
    context: Incarnation
    reason: str

    @override
    def __str__(self) -> str:
        generation, context = self.generation.instance, self.context.instance
        return f"instance {generation} is not connected to {context}: {self.reason}"


def missing_pairs(links: Iterable[WorkerLink]) -> tuple[MissingPair, ...]:
    """Of all ready generation and context workers among ``links``."""
    ready = [link for link in links if link.ready]
    found = [
        MissingPair(generation.incarnation, context.incarnation, reason)
        for generation in ready
        if generation.address.role == "generation"
        for context in ready
        if context.address.role == "context"
        if (reason := _why_missing(generation, context.incarnation))
    ]
    return tuple(sorted(found, key=str))


def _why_missing(generation: WorkerLink, context: Incarnation) -> str:
    gauges = generation.gauges
    pairs = [
        pair
        for pair in (gauges.pairs if gauges is not None else ())
        if pair.side == "generation" and pair.peer == context
    ]
    if not pairs:
        return NOT_TOLD
    return "; ".join(pair.reason for pair in pairs if not pair.lane)


class Arrivals:
    """Lives in the event loop. ``arrived`` is told of each worker once."""

    def __init__(self, patience_s: float, arrived: Callable[[Incarnation], None]) -> None:
        self._patience_s = patience_s
        self._arrived = arrived
        self._here: set[Incarnation] = set()
        self._waiting: dict[Incarnation, asyncio.TimerHandle] = {}

    @property
    def outstanding(self) -> bool:
        """Whether some ready worker still waits for its pairs."""
        return bool(self._waiting)

    def __contains__(self, worker: Incarnation) -> bool:
        return worker in self._here

    def look(self, links: Iterable[WorkerLink]) -> None:
        """Something about workers or their pairs is different now."""
        known = tuple(links)
        held = {
            worker for pair in missing_pairs(known) for worker in (pair.generation, pair.context)
        }
        for link in known:
            worker = link.incarnation
            if not link.ready or worker in self._here:
                continue
            if worker not in held:
                self._arrive(worker)
            elif worker not in self._waiting:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self._patience_s, self._arrive, worker)
                self._waiting[worker] = timer

    def forget(self, worker: Incarnation) -> None:
        """It is not ready any more before it arrived."""
        timer = self._waiting.pop(worker, None)
        if timer is not None:
            timer.cancel()

    def remove(self, worker: Incarnation) -> None:
        """The incarnation left the cluster for good."""
        self.forget(worker)
        self._here.discard(worker)

    def close(self) -> None:
        """Nobody is waited for any more."""
        for worker in tuple(self._waiting):
            self.forget(worker)

    def _arrive(self, worker: Incarnation) -> None:
        self.forget(worker)
        self._here.add(worker)
        self._arrived(worker)
