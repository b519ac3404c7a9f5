"""A cluster without Ray: worker processes and a front end process, started and told of each other
by the test.

For cases that need to stand between the processes: a slow connection, a tiny pool, a worker that
is paused. The processes are the same as in production; only the launcher is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.membership import LAUNCHER_CODEC, FrontEndSettings, MembershipUpdate
from tests.e2e.client import Client
from tests.e2e.slow_link import SlowLink
from tests.support.forked_workers import AnyWorker, start_forked
from transfer.identity import Incarnation
from worker.config import WorkerAddress, WorkerConfig
from worker.messages import WorkerRole

START_TIMEOUT_S = 120
TOKEN = "token of the end-to-end tests"


def read_line(process: AnyWorker, timeout_s: float) -> str:
    """One line of a process's output. Fails with its exit code when it ends first."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            raise TimeoutError(f"no line within {timeout_s} s from {process.args!r}")
    line = process.stdout.readline().decode()
    if not line:
        raise RuntimeError(f"ended with {process.wait(10)}: {process.args!r}")
    return line


@dataclass(frozen=True)
class WorkerStart:
    """A worker that is to be started; ``settings`` are fields of its ``WorkerConfig``."""

    instance: str
    role: WorkerRole
    settings: dict[str, Any]


@dataclass
class Worker:
    """One running worker process."""

    process: AnyWorker
    address: WorkerAddress

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def say(self, line: str) -> None:
        """One line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()


class DirectCluster:
    """Context and generation workers behind one front end. Use :func:`direct_cluster`."""

    def __init__(self, model: Path, tokenizer: Path, logs: Path | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._logs = logs
        self._stack = contextlib.ExitStack()
        self._front_end: subprocess.Popen[bytes] | None = None
        self._routes: dict[str, WorkerAddress] = {}
        self.workers: dict[str, Worker] = {}

    def start_worker(self, instance: str, role: WorkerRole, **settings: Any) -> Worker:
        """Start one worker and wait until it listens."""
        self.start_workers(WorkerStart(instance, role, settings))
        return self.workers[instance]

    def start_workers(self, *starts: WorkerStart) -> None:
        """Start them all at once and wait until they listen."""
        processes = [self._spawn(start) for start in starts]
        for start, process in zip(starts, processes, strict=True):
            line = read_line(process, START_TIMEOUT_S)
            address = WorkerAddress.model_validate(json.loads(line))
            self.workers[start.instance] = Worker(process, address)
            self._routes[start.instance] = address

    def _spawn(self, start: WorkerStart) -> AnyWorker:
        config = WorkerConfig(
            incarnation=Incarnation.mint(start.instance),
            role=start.role,
            model_path=str(self._model),
            model_name="test-model",
            cluster_token=TOKEN,
            **start.settings,
        )
        with contextlib.ExitStack() as opened:
            log = None
            if self._logs is not None:
                log = opened.enter_context(self.log_of(start.instance).open("ab"))
            process = start_forked(stderr=log)
        self._stack.callback(end, process)
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        return process

    def log_of(self, instance: str) -> Path:
        """Where the instance writes, every incarnation after the other, if logs are kept."""
        assert self._logs is not None
        return self._logs / f"{instance}.log"

    @contextlib.contextmanager
    def slowed_down(self, instance: str, delay_s: float) -> Iterator[None]:
        """Front ends that are told of ``instance`` meanwhile reach it over a connection with this
        latency.
        """
        fast = self._routes[instance]
        with SlowLink(fast.port, delay_s) as link:
            self._routes[instance] = fast.model_copy(update={"port": link.port})
            yield
            self._routes[instance] = fast

    def start_front_end(self) -> Client:
        """Start the front end, tell it the workers, wait until it is ready."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "services.frontend"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._front_end = process
        self._stack.callback(end, process)
        self._tell(
            FrontEndSettings(
                model="test-model",
                tokenizer_directory=str(self._tokenizer),
                listen_fd=None,
                host="127.0.0.1",
                port=port,
                cluster_token=TOKEN,
                expected_instances=tuple(self.workers),
                request_timeout_ms=120_000,
                drain_timeout_ms=5_000,
                log_level="info",
            )
        )
        self.tell_membership()
        read_line(process, START_TIMEOUT_S)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        client = Client(url)
        client.wait_ready(deadline - time.monotonic())
        return client

    def tell_membership(self) -> None:
        """Tell the front end which workers are there now."""
        self._tell(MembershipUpdate(workers=tuple(self._routes.values())))

    def forget(self, instance: str) -> None:
        """Notice that this worker's process is gone, as a launcher does: tell everybody."""
        del self._routes[instance]
        gone = self.workers.pop(instance)
        assert gone.process.poll() is not None, f"{instance} still runs"
        self.tell_membership()
        for worker in self.workers.values():
            worker.say(gone.address.incarnation.model_dump_json())

    def _tell(self, message: FrontEndSettings | MembershipUpdate) -> None:
        assert self._front_end is not None
        assert self._front_end.stdin is not None
        self._front_end.stdin.write(LAUNCHER_CODEC.encode(message))
        self._front_end.stdin.flush()

    def close(self) -> None:
        self._stack.close()


def end(process: AnyWorker) -> None:
    """Kill a process that may be paused, and reap it."""
    if process.poll() is None:
        process.kill()
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def direct_cluster(
    model: Path, tokenizer: Path, logs: Path | None = None
) -> Iterator[DirectCluster]:
    """A cluster whose processes are gone when the block ends, however it ends. ``logs`` is a
    directory for what workers write, which otherwise goes to standard error.
    """
    cluster = DirectCluster(model, tokenizer, logs)
    try:
        yield cluster
    finally:
        cluster.close()
