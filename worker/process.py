"""What leading and following processes have in common."""

from __future__ import annotations

from typing import Final, Protocol

from transfer.identity import Incarnation
from worker.config import WorkerAddress

SWITCH_INTERVAL_S: Final = 0.0005
"""The engine thread waits for the interpreter no longer than this for each running thread. A fifth
of it made no wait shorter: the rare long ones are for a core.
"""
STOP_TIMEOUT_S: Final = 5.0
HEALTH_S: Final = 0.5
STOPPED: Final = "stopped"
LOOK_S: Final = 1.0
"""A wait that may last is never without an end. NVRTC, which cuDNN's attention uses, leaves signal
handlers behind that have the kernel resume such a wait: Python's own part of a handler, which runs
in the main thread between two instructions, would not come.
"""


class RankProcess(Protocol):
    """One rank of an instance. ``start`` once, ``wait`` for its end, ``stop`` from any thread."""

    def start(self) -> WorkerAddress:
        """Load this rank's part of the model, allocate pages, listen. Blocks.

        Raises whatever makes the worker unable to serve: ModelLoadError, ValueError for sizes that
        do not fit, TransportError, OSError for ports that are taken.
        """

    def wait(self) -> str:
        """Block until the process must end and return the reason.

        ``stopped`` after :meth:`stop`; otherwise what made it unusable: an engine error, too many
        pages in quarantine, a dead transport, another rank that is gone.
        """

    def stop(self) -> None:
        """End in order. Idempotent, thread safe."""

    def peer_dead(self, incarnation: Incarnation) -> None:
        """Whoever started the other process says that it is dead: nothing of it touches our
        pages.
        """
