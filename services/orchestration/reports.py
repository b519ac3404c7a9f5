"""Splits what one step of a worker said into one report a leg id."""

from __future__ import annotations

from collections.abc import Iterable

from services.orchestration.flow_states import LegReport
from transfer.identity import Incarnation
from worker.messages import LegEnded, LegStarted, StepOutput
from worker.token_runs import TokenRun


class _Parts:
    def __init__(self) -> None:
        self.started: list[LegStarted] = []
        self.runs: list[TokenRun] = []
        self.ended: list[LegEnded] = []


def reports_by_leg(worker: Incarnation, output: StepOutput) -> Iterable[tuple[str, LegReport]]:
    """Reports in the order in which their ids first occur; the order within an id is kept."""
    parts: dict[str, _Parts] = {}
    for started in output.started:
        parts.setdefault(started.request_id, _Parts()).started.append(started)
    for run in output.runs:
        parts.setdefault(run.request_id, _Parts()).runs.append(run)
    for ended in output.ended:
        parts.setdefault(ended.request_id, _Parts()).ended.append(ended)
    return [
        (leg_id, LegReport(worker, tuple(part.started), tuple(part.runs), tuple(part.ended)))
        for leg_id, part in parts.items()
    ]
