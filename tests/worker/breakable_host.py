"""``worker.host`` whose thread of transfers dies of an error at SIGUSR1."""

from __future__ import annotations

import signal

from typing_extensions import override

from transfer.ucx.transport import UcxTransport
from worker import host
from worker.config import WorkerAddress


class BreakableProcess(host.WorkerProcess):
    """A worker like any other until then."""

    @override
    def start(self) -> WorkerAddress:
        address = super().start()
        assert self._agent is not None
        transport = self._agent._transport
        assert isinstance(transport, UcxTransport)
        signal.signal(signal.SIGUSR1, lambda *_: transport._driver.submit(_break))
        return address


def _break() -> None:
    raise SystemError("broken by a test")


if __name__ == "__main__":
    host.WorkerProcess = BreakableProcess  # type: ignore[misc]
    host.leave(host.main())
