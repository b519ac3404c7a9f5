"""How a worker process hears of other workers' deaths, and that it ends whatever hangs in it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from transfer.identity import Incarnation
from worker.config import WorkerConfig
from worker.host import hear_of_deaths

STUCK = """
import sys, threading
from worker import host
from worker.config import WorkerAddress

class Stuck(host.WorkerProcess):
    def start(self):
        return WorkerAddress(
            incarnation=self._config.incarnation, role="context", host="h", port=1, pid=1
        )

    def stop(self):
        {stop}

host.WorkerProcess = Stuck
host.END_TIMEOUT_S = 0.5
host.leave(host.main(["--config-json", "-"]))
"""
HANGS = "threading.Event().wait()"
ENDS_BUT_LEAVES_A_THREAD = (
    "self._ended.set(); threading.Thread(target=threading.Event().wait).start()"
)


def ended(stop: str) -> tuple[int, str]:
    """Exit code and standard error of a process whose ``stop`` does this, after SIGTERM."""
    config = WorkerConfig(
        incarnation=Incarnation.mint("one"),
        role="context",
        model_path="none",
        model_name="none",
        cluster_token="token",
    )
    with subprocess.Popen(
        [sys.executable, "-c", STUCK.format(stop=stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors.decode()


def test_a_process_that_does_not_end_is_ended_and_says_where_its_threads_are() -> None:
    code, errors = ended(HANGS)
    assert code == 1
    assert "Timeout" in errors
    assert "in stop" in errors


def test_nothing_that_is_left_at_the_end_is_waited_for() -> None:
    code, errors = ended(ENDS_BUT_LEAVES_A_THREAD)
    assert code == 0, errors


def test_every_named_death_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    names = [Incarnation.mint("one"), Incarnation.mint("two")]
    lines = [names[0].model_dump_json() + "\n", "nonsense\n", names[1].model_dump_json() + "\n"]
    heard: list[Incarnation] = []
    hear_of_deaths(lines, heard.append)
    assert heard == names
    assert "nonsense" in caplog.text
