"""One worker process: everything a rank is made of, put together from one configuration value.

Threads: the engine thread owns manager, cache and model; the IO thread (asyncio) owns the front-end
server and the transfer agent. ``python -m worker.host --config-json ...`` runs the same thing
without Ray.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.config import WorkerAddress, WorkerConfig


class WorkerProcess:
    """Composition and life of one worker process. ``start`` once, ``wait`` for its end, ``stop``
    from any thread.
    """

    def __init__(self, config: WorkerConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._progress = progress

    def start(self) -> WorkerAddress:
        """Load the model, allocate pages, listen. Blocks; raises whatever makes the worker unable
        to serve.
        """
        raise RuntimeError("the engine of this worker is not composed yet")

    def wait(self) -> str:
        """Block until the worker must end and return the reason: "stopped", a fatal engine error,
        the quarantine limit.
        """
        return "stopped"

    def stop(self) -> None:
        """End in order: refuse front ends, end every leg, stop the engine, close transfers.
        Idempotent, thread safe.
        """
