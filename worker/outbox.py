"""What a step says to front ends, gathered so that each gets one message a step.

Ends of legs are sent through here and nowhere else: a leg that ended cannot end again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.messages import LegEnded, LegStarted, StepOutput
from worker.token_runs import TokenRun


@dataclass(slots=True)
class _Pending:
    runs: list[TokenRun] = field(default_factory=list)
    started: list[LegStarted] = field(default_factory=list)
    ended: list[LegEnded] = field(default_factory=list)


class Outbox:
    """Outputs of the current step by front-end connection."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def run(self, connection: int, run: TokenRun) -> None:
        """Tokens of one choice."""
        self._of(connection).runs.append(run)

    def started(self, connection: int, started: LegStarted) -> None:
        """A leg was matched against the cache."""
        self._of(connection).started.append(started)

    def ended(self, connection: int, ended: LegEnded) -> None:
        """A leg is over."""
        self._of(connection).ended.append(ended)

    def forget(self, connection: int) -> None:
        """The connection is gone: drop what it did not get."""
        self._pending.pop(connection, None)

    def take(self) -> list[tuple[int, StepOutput]]:
        """One output a connection, and start anew."""
        outputs = [
            (
                connection,
                StepOutput(
                    runs=tuple(pending.runs),
                    started=tuple(pending.started),
                    ended=tuple(pending.ended),
                ),
            )
            for connection, pending in self._pending.items()
        ]
        self._pending.clear()
        return outputs

    def _of(self, connection: int) -> _Pending:
        return self._pending.setdefault(connection, _Pending())
