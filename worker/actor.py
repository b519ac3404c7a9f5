"""Ray shell around one rank of a worker: it holds no logic, only the process boundary.

Ray places it, watches it and kills it; no token and no page passes through here. ``start`` and
``wait`` block for long, so the actor has threads for the other methods beside them.
"""

from __future__ import annotations

from collections import deque

import ray

from transfer.identity import Incarnation
from worker.config import WorkerConfig

PROGRESS_LINES = 256


@ray.remote(num_cpus=0, max_concurrency=4, max_restarts=0)
class RankActor:
    """One rank. Create with
    ``RankActor.options(num_gpus=...).remote(config.model_dump_json())``.
    """

    def __init__(self, config_json: str) -> None:
        # Not at the top: the launcher imports this file too, and must not load torch.
        from worker.host import rank_process
        from worker.log import configure_logging

        configure_logging()
        self._lines: deque[str] = deque(maxlen=PROGRESS_LINES)
        self._process = rank_process(
            WorkerConfig.model_validate_json(config_json), self._lines.append
        )

    def start(self) -> str:
        """Load the model and listen. Returns a :class:`worker.config.WorkerAddress` as JSON."""
        return self._process.start().model_dump_json()

    def progress(self) -> list[str]:
        """Lines about the start that were not fetched yet, oldest first."""
        lines: list[str] = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    def wait(self) -> str:
        """Block until the worker must end, and say why. The caller then kills the actor and starts
        a new incarnation.
        """
        return self._process.wait()

    def stop(self) -> None:
        """End the worker in order: connections, engine, transfers. Idempotent."""
        self._process.stop()

    def peer_dead(self, incarnation_json: str) -> None:
        """Another worker's process is known dead: doubts about what it may still touch are over."""
        self._process.peer_dead(Incarnation.model_validate_json(incarnation_json))
