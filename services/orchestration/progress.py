"""Which workers move: the evidence that tells a slow service from one that is wedged.

A worker moves when it gives tokens or when a counter of its work grows. That it answers pings,
takes in requests or cancels them proves nothing about its engine's steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.identity import Incarnation
from worker.messages import StepOutput, WorkerGauges


@dataclass
class _Seen:
    work: tuple[int, ...] | None = None
    moved_s: float | None = None
    busy_since_s: float | None = None
    """None while it runs no sequence."""


class Progress:
    """Of every worker. Times are in the clock of the event loop."""

    def __init__(self) -> None:
        self._seen: dict[Incarnation, _Seen] = {}

    def observe(self, worker: Incarnation, output: StepOutput, now_s: float) -> None:
        """Take in one step of a worker."""
        seen = self._seen.setdefault(worker, _Seen())
        if output.runs:
            seen.moved_s = now_s
        if output.gauges is None:
            return
        work = _work(output.gauges)
        if seen.work is not None and work != seen.work:
            seen.moved_s = now_s
        seen.work = work
        if not output.gauges.running:
            seen.busy_since_s = None
        elif seen.busy_since_s is None:
            seen.busy_since_s = now_s

    def forget(self, worker: Incarnation) -> None:
        """The incarnation is gone."""
        self._seen.pop(worker, None)

    def moved(self, worker: Incarnation, since_s: float) -> bool:
        """Whether the worker moved at ``since_s`` or later."""
        seen = self._seen.get(worker)
        return seen is not None and seen.moved_s is not None and seen.moved_s >= since_s

    def stands_still(self, worker: Incarnation, since_s: float) -> bool:
        """Whether the worker has run sequences since then, or longer, and did not move."""
        seen = self._seen.get(worker)
        busy_since_s = None if seen is None else seen.busy_since_s
        return (
            busy_since_s is not None and busy_since_s <= since_s and not self.moved(worker, since_s)
        )


def _work(gauges: WorkerGauges) -> tuple[int, ...]:
    return (
        gauges.steps_total,
        gauges.prefill_tokens_total,
        gauges.decode_tokens_total,
        gauges.transferred_bytes_total,
    )
