"""The process that clears what a killed launcher leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.reaper import working_in


def sleeper(folder: Path) -> subprocess.Popen[bytes]:
    # It says that it runs, because a process is in its folder only once it does.
    code = "import sys, time; sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    return process


def test_kills_what_works_in_the_folder_and_nothing_else(tmp_path: Path) -> None:
    folder, beside = tmp_path / "session", tmp_path / "session-2"
    (folder / "below").mkdir(parents=True)
    beside.mkdir()
    inside, below, other = sleeper(folder), sleeper(folder / "below"), sleeper(beside)
    try:
        assert set(working_in(folder)) == {inside.pid, below.pid}
        reaper = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.reaper", str(folder)], stdin=subprocess.PIPE
        )
        assert inside.poll() is None
        reaper.communicate(timeout=30)
        assert inside.wait(5) == -9
        assert below.wait(5) == -9
        assert other.poll() is None
        assert not folder.exists()
    finally:
        for process in (inside, below, other):
            process.kill()
            process.communicate()
