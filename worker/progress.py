"""Lines about how far a long start has come: for a log as they are, and for a bar by their share.

Loads no torch: the launcher, which shows them, imports this file.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Final

Progress = Callable[[str], None]
"""Takes one line. Any thread."""

EVERY_S: Final = 2.0
_SHARE: Final = re.compile(r"\((\d{1,3}) %\)")


def share_in(line: str) -> float | None:
    """The share that a line tells, 0 to 1; None for one that tells none."""
    match = _SHARE.search(line)
    return None if match is None else min(int(match[1]), 100) / 100


class BytesRead:
    """Counts bytes of a known total; tells at most every two seconds, and at the end."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        tell: Progress,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._tell = tell
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began_s = self._told_s = clock_s()

    def add(self, num_bytes: int) -> None:
        """So many more are read. Any thread."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = self._clock_s()
            if now_s - self._told_s < EVERY_S and self._done_bytes != self._total_bytes:
                return
            self._told_s = now_s
            line = self._line(now_s - self._began_s)
        self._tell(line)

    def _line(self, spent_s: float) -> str:
        done, total = self._done_bytes, self._total_bytes
        rate = f", {done / 1e6 / spent_s:.0f} MB/s" if spent_s > 0 else ""
        return (
            f"{self._what} {done / 1e6:.0f} of {total / 1e6:.0f} MB "
            f"({100 * done // max(total, 1)} %){rate}"
        )
