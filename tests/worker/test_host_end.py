"""How a worker process hears of other workers' deaths, and that it ends when told to, whatever its
libraries do.
"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.forked_workers import start_forked
from transfer.identity import Incarnation
from worker.config import WorkerConfig
from worker.host import hear_of_deaths

HANGS = "threading.Event().wait()"
ENDS_BUT_LEAVES_A_THREAD = (
    "self._ended.set(); threading.Thread(target=threading.Event().wait).start()"
)


RESTARTS_CALLS = "signal.siginterrupt(signal.SIGTERM, False)"
"""What NVRTC does when cuDNN has it compile an attention kernel."""


def wait_until_asleep(pid: int) -> None:
    """Until the main thread has been asleep for 20 looks in a row."""
    looks = 0
    deadline = time.monotonic() + 20
    while looks < 20:
        assert time.monotonic() < deadline
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        looks = looks + 1 if state == "S" else 0
        time.sleep(0.01)


def ended(*, start: str = "pass", stop: str = "self._ended.set()") -> tuple[int, str]:
    """Exit code and standard error of a process whose parts do this, after SIGTERM."""
    config = WorkerConfig(
        incarnation=Incarnation.mint("one"),
        role="context",
        model_path="none",
        model_name="none",
        cluster_token="token",
    )
    with tempfile.TemporaryFile() as log:
        process = start_forked("tests.worker.stub_host", start, stop, stderr=log)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(config.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            assert process.stdout.readline()
            wait_until_asleep(process.pid)
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return code, log.read().decode()


def test_a_process_that_does_not_end_is_ended_and_says_where_its_threads_are() -> None:
    code, errors = ended(stop=HANGS)
    assert code == 1
    assert "Timeout" in errors
    assert "in stop" in errors


def test_nothing_that_is_left_at_the_end_is_waited_for() -> None:
    code, errors = ended(stop=ENDS_BUT_LEAVES_A_THREAD)
    assert code == 0, errors


def test_the_signal_is_heard_when_a_library_has_system_calls_restarted() -> None:
    code, errors = ended(start=RESTARTS_CALLS)
    assert code == 0, errors


def test_every_named_death_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    names = [Incarnation.mint("one"), Incarnation.mint("two")]
    lines = [names[0].model_dump_json() + "\n", "nonsense\n", names[1].model_dump_json() + "\n"]
    heard: list[Incarnation] = []
    hear_of_deaths(lines, heard.append)
    assert heard == names
    assert "nonsense" in caplog.text
