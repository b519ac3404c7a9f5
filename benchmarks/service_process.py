"""A ``pageferry serve`` in a process of its own, for benchmarks: up on enter, gone on exit."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 30


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """One served model. ``url`` and ``model`` are valid between enter and exit."""

    def __init__(self, model: Path, port: int, arguments: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = ""
        self._command = [
            *(sys.executable, "-m", "services.cli", "serve", str(model), "--port", str(port)),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"the service ended with {self._process.returncode}: {self._command}"
                )
            try:
                if httpx.get(self.url + "/ready", timeout=5).status_code == 200:
                    self.model = httpx.get(self.url + "/v1/models", timeout=5).json()["data"][0][
                        "id"
                    ]
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.__exit__(None, None, None)
        raise TimeoutError(f"the service was not ready within {START_TIMEOUT_S} s: {self._command}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
