"""Worker processes forked from a server that has imported ``worker.host``.

A fresh interpreter imports torch and transformers for eight seconds of processor time before it
reads its configuration; a fork of a process that has done so, and nothing more, starts at once. It
goes on as ``python -m module`` does, and a signal ends it alone.

Each process that starts workers has one server, ``python -m tests.support.forked_workers``, which
ends with it. CUDA is left out: where the machine has it, workers are started afresh.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Final, NoReturn

CUDA: Final = Path("/dev/nvidiactl")
HOST: Final = ("worker.host", "--config-json", "-")
"""Module and arguments: the configuration is the first line of standard input."""
ORDER_BYTES: Final = 1 << 17


class ForkedWorker:
    """A running worker, with what the tests use of ``subprocess.Popen``."""

    def __init__(
        self,
        args: Sequence[str],
        stdin: IO[bytes],
        stdout: IO[bytes],
        status: socket.socket,
    ) -> None:
        self.args = tuple(args)
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self.returncode: int | None = None
        self._status = status
        self.pid = self._number()

    def poll(self) -> int | None:
        """The exit code, if it has ended; negative for a signal."""
        if self.returncode is None and wait([self._status], 0):
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended. Raises TimeoutExpired."""
        if self.returncode is None:
            if not wait([self._status], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self.returncode = self._number()
        self._status.close()

    def _number(self) -> int:
        said = self._status.recv(32)
        assert said, "the server of forked workers is gone"
        return int(said)


AnyWorker = ForkedWorker | subprocess.Popen[bytes]

_lock = threading.Lock()
_servers: list[socket.socket] = []
"""This process's connection to its server, once there is one."""


def start_forked(*command: str, stderr: IO[bytes] | None = None) -> AnyWorker:
    """Start a module with its arguments, by default ``worker.host``, which waits for its
    configuration on standard input.
    """
    args = command or HOST
    if CUDA.exists():
        return start_afresh(*args, stderr=stderr)
    stdin_there, stdin_here = os.pipe()
    stdout_here, stdout_there = os.pipe()
    status_here, status_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    error = 2 if stderr is None else stderr.fileno()
    order = json.dumps({"args": args, "environment": dict(os.environ)}).encode()
    with status_there:
        with _lock:
            given = [stdin_there, stdout_there, error, status_there.fileno()]
            socket.send_fds(_server(), [order], given)
        os.close(stdin_there)
        os.close(stdout_there)
    stdin, stdout = os.fdopen(stdin_here, "wb"), os.fdopen(stdout_here, "rb")
    return ForkedWorker(args, stdin, stdout, status_here)


def start_afresh(*command: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """The same in a new interpreter, as an operator starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", *(command or HOST)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _server() -> socket.socket:
    if not _servers:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        _servers.append(here)
    return _servers[0]


def _serve(orders: socket.socket) -> None:
    """Fork a worker for every order until the process that gives them has ended."""
    import worker.host  # noqa: F401  this is what is shared

    # Collections in children leave the pages of what is imported shared.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        order, given, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            _keep(json.loads(order), given)
        for number in given:
            os.close(number)


def _keep(order: dict[str, Any], given: list[int]) -> NoReturn:
    """Fork the worker, say its process id, wait for its end, say its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status_number = given
    status = socket.socket(fileno=status_number)
    pid = os.fork()
    if pid == 0:
        status.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(order)
    for stream in streams:
        os.close(stream)
    status.send(b"%d" % pid)
    _, how = os.waitpid(pid, 0)
    status.send(b"%d" % os.waitstatus_to_exitcode(how))
    os._exit(0)


def _run(order: dict[str, Any]) -> NoReturn:
    """Go on as ``python -m`` does. What is raised ends the process as it ends any."""
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[:] = order["args"]
    # That the module has been imported already is what this is about.
    warnings.filterwarnings("ignore", module="runpy")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
