"""``python -m services.reaper FOLDER``: end what Ray leaves behind when its launcher is killed.

Ray's own processes are tied to the launcher by the kernel, but some of their children notice only
after half a minute. All of them work in FOLDER. The end of the input says that the launcher is
gone; then every process of this user that still works there is killed, and the folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

GIVE_UP_S: Final = 10.0
POLL_S: Final = 0.05


def main(folder: Path) -> None:
    """Wait for the end of the input, then clear ``folder``."""
    # Only the end of the launcher ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + GIVE_UP_S
    while (pids := tuple(working_in(folder))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def working_in(folder: Path) -> Iterator[int]:
    """Processes whose working folder is ``folder`` or below it; zombies have none."""
    inside = str(folder) + os.sep
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            place = os.readlink(entry / "cwd") + os.sep
        except OSError:
            continue  # gone, or somebody else's
        if place.startswith(inside):
            yield int(entry.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
