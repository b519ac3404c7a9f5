"""``pageferry serve`` in a process of its own, with its output read, for end-to-end tests.

What the tests know about the service they know as an operator does: from its lines, its metrics,
and the process table.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

UP: Final = re.compile(r"^([a-z]+-\d+): up on \S+ \(pid (\d+)\)$")
SERVED: Final = re.compile(r"is served on (http://\S+)/v1 ")
STOP_TIMEOUT_S: Final = 40.0


class LaunchedService:
    """One service. Ready on enter, gone on exit."""

    def __init__(self, model: Path | None, *arguments: str, start_timeout_s: float = 300.0) -> None:
        chosen = () if model is None else (str(model),)
        self._command = [
            *(sys.executable, "-P", "-m", "services.cli", "serve", *chosen, "--port", "0"),
            *arguments,
        ]
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self.lines: list[str] = []
        """Everything the launcher has said, and workers through it."""
        self.pids: dict[str, list[int]] = {}
        """Process of every incarnation of every instance, oldest first."""
        self.url = ""

    @property
    def process(self) -> subprocess.Popen[str]:
        """The launcher."""
        assert self._process is not None
        return self._process

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait(lambda: bool(self.url), self._start_timeout_s, "the service is ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> int:
        """End it as Ctrl-C does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {STOP_TIMEOUT_S} s\n{self.tail()}") from None
        assert self._reader is not None
        self._reader.join(10)
        return self.process.returncode

    def pid(self, instance: str) -> int:
        """Process of the newest incarnation of an instance."""
        assert instance in self.pids, f"no line said that {instance} is up\n{self.tail()}"
        return self.pids[instance][-1]

    def kill(self, instance: str) -> int:
        """Kill the newest incarnation of an instance, like the kernel would; its pid."""
        pid = self.pid(instance)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_restarted(self, instance: str, old_pid: int, timeout_s: float = 60.0) -> int:
        """Wait until another process than ``old_pid`` serves as ``instance``; its pid."""
        self.wait(lambda: self.pid(instance) != old_pid, timeout_s, f"{instance} is back")
        return self.pid(instance)

    def descendants(self) -> list[psutil.Process]:
        """Every process below the launcher: Ray's, the workers, the front end."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def front_end(self) -> psutil.Process:
        """The front end process."""
        for process in self.descendants():
            if "services.frontend" in process.cmdline():
                return process
        raise AssertionError(f"no front end runs\n{self.tail()}")

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until a line of the launcher makes ``condition`` true."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if self.process.poll() is not None:
                    raise AssertionError(
                        f"ended with {self.process.returncode} before: {what}\n{self.tail()}"
                    )
                if left <= 0:
                    raise AssertionError(f"not within {timeout_s} s: {what}\n{self.tail()}")
                self._changed.wait(min(left, 1.0))

    def tail(self) -> str:
        """The last lines, for messages of failed assertions."""
        return "\n".join(self.lines[-60:])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._take(line.rstrip("\n"))
                self._changed.notify_all()

    def _take(self, line: str) -> None:
        self.lines.append(line)
        up = UP.match(line)
        if up is not None:
            self.pids.setdefault(up.group(1), []).append(int(up.group(2)))
        served = SERVED.search(line)
        if served is not None:
            self.url = served.group(1)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
