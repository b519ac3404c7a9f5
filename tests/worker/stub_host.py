"""``worker.host`` whose process has no parts: what its start and its stop do instead is code in the
arguments.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from typing_extensions import override

from worker import host
from worker.config import WorkerAddress


class Stub(host.WorkerProcess):
    """Says an address at which nobody listens."""

    @override
    def start(self) -> WorkerAddress:
        self._do(sys.argv[1])
        return WorkerAddress(
            incarnation=self._config.incarnation, role="context", host="h", port=1, pid=1
        )

    @override
    def stop(self) -> None:
        self._do(sys.argv[2])

    def _do(self, code: str) -> None:
        names: dict[str, Any] = {"self": self, "signal": signal, "threading": threading}
        exec(code, names)


if __name__ == "__main__":
    host.WorkerProcess = Stub  # type: ignore[misc]
    host.END_TIMEOUT_S = 0.5
    host.leave(host.main(["--config-json", "-"]))
